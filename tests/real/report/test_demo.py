"""The demonstration, as the user runs it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


def test_the_demo_names_the_rank_it_slowed(tmp_path):
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "demo", "--steps", "30", "--html", str(page), "--json",
         "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)  # nothing else on stdout
    assert answer["schema"] == "kansoku.report/1"
    assert answer["verdict"] == "found"
    (straggler,) = answer["stragglers"]
    assert straggler["phase"] == "forward"
    assert f"rank {straggler['rank']} was slowed in forward; the report named it" in done.stderr
    assert answer["mfu"]["peak_source"].startswith("measured")
    assert page.stat().st_size > 500_000
