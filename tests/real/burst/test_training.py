"""The bursts of a real training on a slow link: which collective caused them, what probes felt."""

import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from tests.labs import burst_training as training
from tests.labs.burst import RATE_BITS_PER_S, BurstLab
from tests.labs.training import bare_environment

from kansoku.app.burst import report, report_json, report_view
from kansoku.app.store import open_store
from kansoku.model import table_schema

pytestmark = pytest.mark.real

GRADIENTS = training.WIDTH**2 * 4


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """Train on two hosts, watch the receiver's port, probe the path; report the run."""
    folder = tmp_path_factory.mktemp("training")
    store, run = folder / "store", folder / "run"
    with BurstLab() as lab:
        lab.start_probing()
        watch = lab.watch(
            "b", "--port", "nic", "--line-rate", f"nic={RATE_BITS_PER_S / 1e9}",
            "--end-threshold", "0.1", "--store", str(store),
        )  # fmt: skip
        begun = watch.stderr.readline()
        done = subprocess.run(
            [sys.executable, "-m", "kansoku", "run", "--out", str(run), "--",
             sys.executable, training.__file__, lab.ns("a"), lab.ns("b"), str(folder)],
            env=bare_environment(), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=120)
        probes = lab.probes()
    assert done.returncode == 0, done.stderr
    assert watch.returncode == 0, begun + err
    rows = [
        {"time_ns": p["t1_ns"], "source": "a/nic", "target": "b/nic", "probes": 1,
         "lost": int(p["lost"]), "rtt_p50_ns": p["rtt_ns"]}
        for p in probes
    ]  # fmt: skip
    opened = open_store(store)
    try:
        opened.append("probes", pl.DataFrame(rows, schema=table_schema("probes")))
    finally:
        opened.close()
    return report(Path(run), store=store)


def test_the_gradients_all_reduce_is_named(answer):
    """DDP reduces during the backward pass; each reduction fills the link for some 80 ms."""
    (most, *_) = report_json(answer)["collectives"]
    assert most["collective"] == "all_reduce"
    assert most["phase"] == "backward"
    # A busy machine cuts a burst in two, or two steps' bursts run together.
    assert most["bursts"] >= training.STEPS // 2
    assert most["burst_bytes"] > 0.7 * training.STEPS * GRADIENTS
    assert most["bytes_ratio"] > 0.5


def test_the_probes_waited_behind_them(answer):
    (beside,) = [p for p in report_json(answer)["probes"] if p["port"] == "nic"]
    during, otherwise = beside["during_bursts"], beside["otherwise"]
    assert min(during["probes"], otherwise["probes"]) > 30
    # TCP fills the queue that the link drains: far above the fraction of a millisecond without.
    assert during["rtt_ms"]["p50"] > 3 * otherwise["rtt_ms"]["p50"]


def test_one_report_shows_both(answer):
    titles = [getattr(block, "title", None) for block in report_view(answer).blocks]
    assert "What caused them" in titles
    assert "Probes on the same path" in titles
