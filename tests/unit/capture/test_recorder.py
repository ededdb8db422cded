"""Steps and phases of one process, without torch: whose update ends a step, what touches what."""

import threading

import polars as pl
import pytest
from tests.labs.training import CACHE

from kansoku.capture.payload.phases import Phases
from kansoku.capture.payload.recorder import Recorder
from kansoku.formats.run_directory import read_run
from kansoku.model import ring

KIND = ring.KIND_CODES


class Optimizer:
    param_groups = (1,)


@pytest.fixture(params=["compiled", "python"])
def recorder(request, tmp_path, monkeypatch):
    monkeypatch.setenv("KANSOKU_RING_DIR", str(tmp_path))
    monkeypatch.setenv("KANSOKU_CACHE_DIR", str(CACHE))
    monkeypatch.setenv("KANSOKU_NATIVE", str(int(request.param == "compiled")))
    monkeypatch.setenv("KANSOKU_RUN_ID", "r")
    monkeypatch.setenv("KANSOKU_RING_BYTES", "300000")
    for name in ("KANSOKU_OUT", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    made = Recorder()
    assert made.start()
    assert isinstance(made.phases, Phases) == (request.param == "python")
    return made


def phase(recorder, kind):
    recorder.close(recorder.open(KIND[kind], kind))


def update(recorder, optimizer):
    recorder.update_begins(optimizer)
    recorder.update_ends(optimizer)


def spans(tmp_path):
    return read_run(tmp_path / "r").spans


def test_steps_touch_to_the_nanosecond(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    for _ in range(4):
        phase(recorder, "forward")
        phase(recorder, "backward")
        update(recorder, one)
    phase(recorder, "evaluation")
    recorder.finish()
    steps = spans(tmp_path).filter(pl.col("kind") == "step")
    ends = (steps["start_ns"] + steps["duration_ns"]).to_list()
    assert steps["start_ns"].to_list()[1:] == ends[:-1]
    assert [bool(a) for a in steps["attributes"]] == [False] * 4 + [True]  # the last: incomplete


def test_two_optimizers_in_turn_are_one_step(recorder, tmp_path):
    generator, critic = Optimizer(), Optimizer()
    recorder.optimizers.update((generator, critic))
    for _ in range(3):
        for one in (critic, generator):
            phase(recorder, "forward")
            phase(recorder, "backward")
            update(recorder, one)
    recorder.finish()
    found = spans(tmp_path)
    assert len(found.filter(pl.col("kind") == "step")) == 3
    assert found.filter(pl.col("kind") == "forward")["step"].to_list() == [0, 0, 1, 1, 2, 2]


def test_an_optimizer_that_never_steps_holds_nothing_up(recorder, tmp_path):
    used, idle = Optimizer(), Optimizer()
    recorder.optimizers.update((used, idle))
    for _ in range(3):
        phase(recorder, "forward")
        update(recorder, used)
    recorder.finish()
    found = spans(tmp_path)
    assert len(found.filter(pl.col("kind") == "step")) == 3
    assert found.filter(pl.col("kind") == "forward")["step"].to_list() == [0, 1, 2]
    parents = found.filter(pl.col("kind") == "forward").join(
        found.filter(pl.col("kind") == "step"), left_on="parent", right_on="id", suffix="_up"
    )
    assert parents["step_up"].to_list() == [0, 1, 2]


def test_an_update_inside_a_backward_ends_the_step_with_it(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    for _ in range(2):
        backward = recorder.open(KIND["backward"], "backward")
        update(recorder, one)
        recorder.close(backward)
    recorder.finish()
    found = spans(tmp_path)
    assert len(found.filter(pl.col("kind") == "step")) == 2
    assert found.filter(pl.col("kind") == "backward")["step"].to_list() == [0, 1]


def test_an_exception_leaves_no_phase_open(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    outer = recorder.open(KIND["forward"], "outer")
    recorder.open(KIND["data_wait"], "never closed by itself")
    recorder.close(outer)
    recorder.update_begins(one)  # raises inside: its end never comes
    phase(recorder, "forward")
    update(recorder, one)
    recorder.finish()
    found = spans(tmp_path)
    assert found["duration_ns"].null_count() == 0
    assert found["duration_ns"].min() >= 0


def test_an_update_that_broke_inside_a_forward_leaves_no_step_before_its_start(recorder, tmp_path):
    broken, sound = Optimizer(), Optimizer()
    recorder.optimizers.update((broken, sound))
    forward = recorder.open(KIND["forward"], "forward")
    recorder.update_begins(broken)  # raises: its end never comes
    recorder.close(forward)
    update(recorder, sound)
    recorder.update_ends(sound)
    update(recorder, sound)
    recorder.finish()
    assert spans(tmp_path)["duration_ns"].min() >= 0


def test_off_records_nothing_and_on_goes_on(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    phase(recorder, "forward")
    update(recorder, one)
    recorder.switched(on=False)
    assert read_run(tmp_path / "r").processes[0].state == "off"
    recorder.switched(on=True)
    phase(recorder, "forward")
    update(recorder, one)
    recorder.finish()
    steps = spans(tmp_path).filter(pl.col("kind") == "step")
    assert len(steps) == 2
    # The time between is nobody's.
    assert steps["start_ns"][1] > steps["start_ns"][0] + steps["duration_ns"][0]


def test_phases_and_steps_longer_than_the_ring_are_completed(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    capacity = ring.read_header(recorder.writer.buffer).lanes[0].capacity
    outer = recorder.open(KIND["forward"], "outer")
    for _ in range(capacity + 1):
        phase(recorder, "data_wait")
    recorder.close(outer)
    recorder.tokens = 12.0
    update(recorder, one)
    recorder.finish()
    found = spans(tmp_path)
    (forward,) = found.filter(pl.col("kind") == "forward").to_dicts()
    (step,) = found.filter(pl.col("kind") == "step").to_dicts()
    assert forward["duration_ns"] >= 0
    assert forward["parent"] == step["id"]
    assert step["duration_ns"] >= forward["duration_ns"]
    assert step["cpu_ns"] >= forward["cpu_ns"] >= 0


def test_the_header_counts_what_closed(recorder, tmp_path):
    one = Optimizer()
    recorder.optimizers.add(one)
    for _ in range(2):
        phase(recorder, "forward")
        update(recorder, one)
    recorder.count(KIND["collective"], 40)
    recorder.count(KIND["collective"], 2)
    recorder.open(KIND["forward"], "left open")  # closed at the end, its step incomplete
    recorder.finish()
    counters = read_run(tmp_path / "r").counters
    counted = {row["kind"]: (row["count"], row["bytes"]) for row in counters.to_dicts()}
    assert counted == {
        "step": (2, 0), "forward": (3, 0), "optimizer": (2, 0), "collective": (2, 42),
    }  # fmt: skip


def test_a_forked_child_starts_empty_and_joins_only_a_group(recorder):
    recorder.forget()
    assert recorder.open(KIND["forward"], "x") == 0
    assert recorder.writer is None


def test_the_facts_say_which_gpus_are_the_jobs(tmp_path, monkeypatch):
    """Of the environment alone: CUDA is not touched."""
    monkeypatch.setenv("KANSOKU_RING_DIR", str(tmp_path))
    monkeypatch.setenv("KANSOKU_RUN_ID", "r")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("SLURM_STEP_GPUS", "6,7")
    monkeypatch.delenv("SLURM_JOB_GPUS", raising=False)
    monkeypatch.delenv("KANSOKU_OUT", raising=False)
    made = Recorder()
    assert made.start()
    made.finish()
    (rank,) = read_run(tmp_path / "r").facts.ranks
    assert rank.extra == {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "6,7"}


def test_another_thread_changes_nothing(recorder, tmp_path):
    mine, other = Optimizer(), Optimizer()
    recorder.optimizers.add(mine)

    def elsewhere():
        assert recorder.open(KIND["forward"], "elsewhere") == 0
        for _ in range(3):
            update(recorder, other)

    for _ in range(2):
        phase(recorder, "forward")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        update(recorder, mine)
    recorder.finish()
    found = spans(tmp_path)
    assert found["kind"].to_list().count("step") == 2
    assert found["kind"].to_list().count("optimizer") == 2
    assert "elsewhere" not in found["name"].to_list()


def test_after_the_end_nothing_is_written(recorder, tmp_path):
    phase(recorder, "forward")
    recorder.finish()
    before = len(spans(tmp_path))
    phase(recorder, "forward")
    update(recorder, Optimizer())
    assert not recorder.inside(KIND["forward"])
    assert len(spans(tmp_path)) == before
