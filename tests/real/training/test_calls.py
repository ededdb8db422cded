"""Once training has settled, wrappers in C take over: nothing of the job or its record may change."""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
from tests.labs.training import bare_environment, observed_environment

from kansoku.formats.run_directory import RunData, read_run

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parents[2] / "labs" / "odd_training.py"


@dataclass(frozen=True, kw_only=True)
class Odd:
    """What the script found, and what was recorded."""

    found: dict
    said: str
    data: RunData | None


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    def run(name, environment):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder / name)],
            env=environment | {"KANSOKU_RUN_ID": name},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        rings = folder / "rings" / name
        return Odd(
            found=json.loads((folder / name / "odd.json").read_text()),
            # torch's profiler names times and process numbers.
            said="".join(
                line
                for line in (done.stdout + done.stderr).splitlines(keepends=True)
                if not line.startswith(("USDT:", "ERROR:20"))
            ),
            data=read_run(rings) if rings.exists() else None,
        )

    folder = tmp_path_factory.mktemp("odd")
    for name in ("bare", "python", "c"):
        (folder / name).mkdir()
    return {
        "bare": run("bare", bare_environment()),
        "python": run("python", observed_environment(folder, KANSOKU_NATIVE=0)),
        "c": run("c", observed_environment(folder)),
    }


def test_the_job_computes_and_says_the_same(odd):
    wrappers = ("before", "after", "compiled")
    found = [{k: v for k, v in o.found.items() if k not in wrappers} for o in odd.values()]
    assert found[0] == found[1] == found[2]
    assert odd["c"].said == odd["bare"].said
    assert odd["c"].found["breaks"] == 0
    assert odd["c"].found["graphs"] == 1


def test_c_was_in_place_and_gave_way_to_dynamo(odd):
    in_place = {
        name: [o.found[k] for k in ("before", "after", "compiled")] for name, o in odd.items()
    }
    assert in_place == {
        "bare": ["function"] * 3,
        "python": ["function"] * 3,
        "c": ["Call", "Call", "function"],
    }


def test_the_record_is_the_same(odd):
    def rows(data):
        assert [p.state for p in data.processes] == ["closed"]
        assert [text for text in data.missing if "swallowed" in text] == []
        spans = data.spans.sort("start_ns", "id")
        kinds = dict(spans.select("id", "kind").iter_rows())
        return [
            (
                s["kind"],
                s["name"],
                s["attributes"],
                s["step"],
                kinds.get(s["parent"]),
                s["duration_ns"] is None,
            )
            for s in spans.iter_rows(named=True)
            if s["kind"] != "gc"
        ]

    c, python = rows(odd["c"].data), rows(odd["python"].data)
    assert c == python
    kinds = {row[0] for row in c}
    assert kinds >= {
        "step",
        "data_wait",
        "forward",
        "backward",
        "optimizer",
        "evaluation",
        "compile",
    }


def test_every_step_has_its_forward(odd):
    spans = odd["c"].data.spans
    steps, forwards = (
        set(spans.filter(spans["kind"] == kind)["step"]) for kind in ("step", "forward")
    )
    assert len(steps) == 20 + 34  # usual updates, and those of the odd part
    assert steps - forwards == {52, 53}  # those of a compiled bound method: docs/capture.md, limits


def test_steps_compute_the_same_work_before_and_after(odd):
    """Three forwards of two products of two rows by 8 × 8 weights, 2 FLOPs a multiply-add."""
    resources = odd["c"].data.resources
    steps = resources.filter(resources["kind"] == "step").sort("step")["flops"].to_list()
    assert steps[:22] == [3 * 2 * (2 * 2 * 8 * 8)] * 22  # 20 usual ones, two by keyword
    assert steps[22:26] == [3 * 2 * (2 * n * 8 * 8) for n in (3, 5, 3, 5)]


_FORKS = """
import os, sys
import torch
import torch.distributed as dist
from _kansoku import hooks

def train(steps):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return hooks._is_quick()

torch.set_num_threads(1)
assert train(18)
child = os.fork()
if child == 0:
    joins = sys.argv[1]
    assert not hooks._is_quick()
    if joins:
        dist.init_process_group("gloo", init_method=f"file://{joins}", rank=0, world_size=1)
    quick = train(25)
    if joins:
        dist.destroy_process_group()
        from _kansoku.recorder import RECORDER
        RECORDER.finish()
    os._exit(3 if quick else 4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert train(2)
sys.exit(code)
"""


@pytest.mark.parametrize("joins", [True, False])
def test_a_forked_child_has_a_ring_of_its_own_or_none(tmp_path, joins):
    environment = observed_environment(
        tmp_path, KANSOKU_RUN_ID="forks", KANSOKU_OUT=tmp_path, KANSOKU_LAUNCH_NODE=platform.node()
    )
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(tmp_path / "rendezvous") if joins else ""],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (3 if joins else 4), done.stderr
    # Each by itself: they are no ranks of one job.
    rings = [read_run(file) for file in (tmp_path / "rings" / "forks").glob("*.ring")]
    assert [p.state for data in rings for p in data.processes] == ["closed"] * len(rings)
    counts = []
    for spans in (data.spans for data in rings):
        steps = spans.filter(pl.col("kind") == "step")
        incomplete = steps["attributes"].fill_null("").str.contains("incomplete")
        counts.append(
            (len(steps.filter(~incomplete)), len(spans.filter(pl.col("kind") == "forward")))
        )
    parent, child = (18 + 2, 18 + 2), (25, 25)
    assert sorted(counts) == ([parent, child] if joins else [parent])
    said = [file.read_text() for file in tmp_path.glob("unobserved-*.txt")]
    assert len(said) == (0 if joins else 1)
    assert all(
        "was not observed: a child of another process that trains in no process group" in text
        for text in said
    )
