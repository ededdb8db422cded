"""The agent follows rings: each step once, full spans of sampled and slow steps only."""

import json
import os
from pathlib import Path

import polars as pl
import pytest

from kansoku.app.agent_rings import RingFollower, with_nodes
from kansoku.app.web_jobs._runs import nodes_of
from kansoku.model import ring

ANCHOR = (1_000, 1_700_000_000_000_000_000)
MS = 1_000_000


class Job:
    """A ring of one rank, written step by step."""

    def __init__(self, folder, rank=0, *, pid=2**22 + 9, process_start=9):
        self.path = folder / "r-1" / f"n1-{rank + 5}.ring"
        self.path.parent.mkdir(exist_ok=True)
        self.buffer = bytearray(1 << 18)
        ring.format_ring(
            self.buffer, pid=pid, process_start=process_start, anchor=ANCHOR, lane_shares=(1,)
        )
        self.writer = ring.RingWriter(self.buffer)
        self.writer.set_ranks(rank, rank, 2)
        self.writer.set_facts({"node": "n1", "run": "r-1", "groups": []})
        self.now = 2_000
        self.step = 0

    def run(self, *durations_ms):
        for duration in durations_ms:
            self.step += 1
            end = self.now + round(duration * MS)
            outer = self.writer.open(
                ring.pack_template(ring.KIND_CODES["step"]), self.now, self.step, 0
            )
            inner = self.writer.open(
                ring.pack_template(ring.KIND_CODES["forward"]), self.now, self.step, outer
            )
            self.writer.close(inner, self.now, end - MS // 2, -1)
            self.writer.close(outer, self.now, end, -1)
            self.now = end
        for kind in ("step", "forward"):
            self.writer.set_count(ring.KIND_CODES[kind], self.step, 0)
        self.path.write_bytes(self.buffer)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def steps(found):
    return found.tables["steps"]["step"].to_list() if "steps" in found.tables else []


def test_each_step_comes_once(tmp_path, job):
    follower = RingFollower(tmp_path, sample_every=1000)
    job.run(10, 10, 10)
    assert steps(follower.read()) == [1, 2, 3]
    assert steps(follower.read()) == []
    job.run(10, 10)
    found = follower.read()
    assert steps(found) == [4, 5]
    assert found.tables["steps"]["forward_ns"].to_list() == [9_500_000] * 2
    assert {(s.metric, s.value) for s in found.samples} == {
        ("kansoku.run.ring.records", 10.0), ("kansoku.run.ring.lost", 0.0),
    }  # fmt: skip


def test_spans_travel_for_sampled_and_slow_steps(tmp_path, job):
    follower = RingFollower(tmp_path, sample_every=10)
    job.run(*([10] * 11), 35, 10)
    spans = follower.read().tables["spans"]
    assert sorted(spans["step"].unique()) == [10, 12]
    assert sorted(spans["kind"].unique()) == ["forward", "step"]


def test_steps_that_travel_say_where_the_rank_runs(tmp_path, job):
    follower = RingFollower(tmp_path, sample_every=10)
    job.run(*([10] * 10))
    spans = follower.read().tables["spans"].sort("kind")
    told = dict(spans.select("kind", "attributes").iter_rows())
    assert told == {"forward": None, "step": '{"node":"n1"}'}
    assert nodes_of(spans) == {0: "n1"}


def test_what_a_span_says_already_stays():
    spans = pl.DataFrame(
        {
            "kind": ["step", "step", "forward", "step"],
            "rank": [0, 7, 0, None],
            "attributes": ['{"incomplete":true}', None, None, None],
        },
        schema={"kind": pl.String, "rank": pl.Int32, "attributes": pl.String},
    )
    told = with_nodes(spans, {0: 'a"b', None: "c"})
    assert [text and json.loads(text) for text in told["attributes"]] == [
        {"node": 'a"b', "incomplete": True}, None, None, None,
    ]  # fmt: skip
    assert nodes_of(told) == {0: 'a"b'}


def test_a_noisy_job_does_not_flood_the_centre(tmp_path, job):
    follower = RingFollower(tmp_path, sample_every=10_000)
    # every third step is slow: the median stays at 10 ms
    job.run(*([10, 10, 50] * 60))
    spans = follower.read().tables["spans"]
    assert spans["step"].n_unique() == 20


def test_dead_processes_and_broken_rings_are_survived(tmp_path, job):
    job.run(10)
    (tmp_path / "r-2").mkdir()
    (tmp_path / "r-2" / "n1-7.ring").write_bytes(b"not a ring")
    follower = RingFollower(tmp_path)
    assert steps(follower.read()) == [1]
    assert follower.running() == [], "no process of that number lives"


def test_no_folder_is_no_job(tmp_path):
    assert RingFollower(tmp_path / "none").read().tables == {}


def test_a_number_that_another_process_has_now_is_no_living_rank(tmp_path):
    # proc(5): starttime is the 22nd field, the 20th after the name in brackets.
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    follower = RingFollower(tmp_path)
    Job(tmp_path, pid=os.getpid(), process_start=started + 1).run(10)
    follower.read()
    assert follower.running() == []
    Job(tmp_path, pid=os.getpid(), process_start=started).run(10)
    follower.read()
    assert follower.running() == [("r-1", 0, os.getpid())]
