"""Run directories: columns, merging of ring and copy, and every kind of damage."""

import json
import os
import struct
import subprocess
import sys

import polars as pl
import pytest

from kansoku.errors import InputError
from kansoku.formats.run_directory import read_run
from kansoku.model import ring, table_schema

ANCHOR = (1_000, 1_700_000_000_000_000_000)
UNIX = ANCHOR[1] - ANCHOR[0]


class Ring:
    """A ring being written, and its file."""

    def __init__(self, path, rank=0, size=1 << 17, node="n1", pid=5):
        self.path = path
        self.buffer = bytearray(size)
        ring.format_ring(self.buffer, pid=pid, process_start=9, anchor=ANCHOR, lane_shares=(1,))
        self.writer = ring.RingWriter(self.buffer)
        self.writer.set_ranks(rank, rank, 2)
        self.writer.set_facts(
            {"node": node, "run": "r", "groups": [{"name": "0", "ranks": [0, 1]}]}
        )

    def span(self, kind, start, end=None, **fields):
        step, parent = fields.pop("step", 0), fields.pop("parent", 0)
        template = ring.pack_template(ring.KIND_CODES[kind], **fields)
        span = self.writer.open(template, start, step, parent)
        if end is not None:
            self.writer.close(span, start, end, -1)
        return span

    def save(self, data=None):
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(self.buffer if data is None else data)


@pytest.fixture
def one(tmp_path):
    return Ring(tmp_path / "n1-5.ring")


def test_columns_are_the_spans_table(one, tmp_path):
    step = one.span("step", 2_000, 9_000, value_a=64.0, value_b=1e6, peak_rss_bytes=4096)
    one.span("forward", 2_000, 3_000, name=one.writer.intern("GPT"), parent=step, thread=8)
    one.span(
        "collective", 3_000, name=one.writer.intern("all_reduce"), group=one.writer.intern("0"),
        dtype=one.writer.intern("bfloat16"), sequence=0, bytes_=0, step=-1,
        flags=ring.FLAG_ASYNC, peer=2, attributes=one.writer.intern('{"x":1}'),
    )  # fmt: skip
    one.save()
    data = read_run(tmp_path)
    assert dict(data.spans.schema) == table_schema("spans")
    rows = data.spans.to_dicts()
    assert [row["kind"] for row in rows] == ["step", "forward", "collective"]
    assert rows[0]["start_ns"] == UNIX + 2_000
    assert rows[1]["parent"] == rows[0]["id"]
    assert (rows[1]["name"], rows[1]["duration_ns"], rows[1]["cpu_ns"]) == ("GPT", 1_000, None)
    assert (rows[2]["duration_ns"], rows[2]["step"], rows[2]["group"]) == (None, None, "0")
    assert (rows[2]["sequence"], rows[2]["bytes"], rows[2]["dtype"]) == (0, 0, "bfloat16")
    assert json.loads(rows[2]["attributes"]) == {"x": 1, "async": True, "peer": 1}
    resources = data.resources.to_dicts()[0]
    assert (resources["tokens"], resources["flops"]) == (64.0, 1e6)
    assert resources["peak_rss_bytes"] == 4096
    assert data.facts.ranks[0].groups[0].ranks == (0, 1)


def as_copy(one, records=None):
    """Return the bytes of a drained copy."""
    header = ring.read_header(one.buffer)
    head = bytearray(one.buffer[: header.records_offset])
    struct.pack_into("<I", head, 28, 1)
    lane = header.lanes[0]
    count = one.writer._newest() if records is None else records
    return bytes(head) + bytes(one.buffer[lane.offset : lane.offset + count * 128])


def test_ring_and_copy_are_one(one, tmp_path):
    one.span("forward", 1, 2)
    hanging = one.span("backward", 3)
    one.path = tmp_path / "n1" / "n1-5.ring"
    one.save(as_copy(one))
    one.writer.close(hanging, 3, 50, -1)
    one.span("optimizer", 60, 70)
    one.path = tmp_path / "n1-5.ring"
    one.save()
    spans = read_run(tmp_path).spans
    assert spans["kind"].to_list() == ["forward", "backward", "optimizer"]
    assert spans["duration_ns"].to_list() == [1, 47, 10]


def test_a_late_completion_replaces_the_open_record(one, tmp_path):
    template = ring.pack_template(1)
    span = one.writer.open(template, 5, 0, 0)
    one.writer.remember(span, template, 0, 0)
    capacity = ring.read_header(one.buffer).lanes[0].capacity
    for number in range(capacity):
        one.span("forward", number, number + 1)
    one.writer.close(span, 5, 1_000_005, -1)
    one.save()
    data = read_run(tmp_path)
    steps = data.spans.filter(pl.col("kind") == "step")
    assert steps["duration_ns"].to_list() == [1_000_000]
    assert steps["id"].to_list() == [span]
    assert data.processes[0].lost == 1  # the first forward made room for the completion
    assert any("1 records were overwritten" in text for text in data.missing)


@pytest.mark.parametrize(
    ("spoil", "says", "left"),
    [
        (lambda b, at: b[: at + 300], "truncated", 2),
        (lambda b, at: b[:2_000], "cannot be read", 0),
        (lambda b, at: b"", "empty", 0),
        (lambda b, at: b[: at + 128] + b"\xff" * 8 + b[at + 136 :], "torn", 2),
        (lambda b, at: b[:8] + struct.pack("<I", 9) + b[12:], "ring format 9", 0),
    ],
)
def test_damage_is_said_and_nothing_is_invented(one, tmp_path, spoil, says, left):
    for number in range(3):
        one.span("forward", number, number + 1)
    at = ring.read_header(one.buffer).lanes[0].offset
    one.save(spoil(bytes(one.buffer), at))
    (tmp_path / "run.json").write_text('{"schema": "kansoku.run/1", "run": "r"}')
    data = read_run(tmp_path)
    assert any(says in text for text in data.missing), data.missing
    assert len(data.spans) == left


def test_a_copy_cut_in_its_last_record(one, tmp_path):
    for number in range(3):
        one.span("forward", number, number + 1)
    one.save(as_copy(one)[:-28])
    data = read_run(tmp_path)
    assert len(data.spans) == 2
    assert any("last record was cut" in text for text in data.missing)


def test_a_rank_that_started_twice_keeps_its_ids_apart(tmp_path):
    for pid in (5, 6):
        part = Ring(tmp_path / f"n1-{pid}.ring", pid=pid)
        part.span("forward", pid, pid + 1)
        part.save()
    data = read_run(tmp_path)
    assert data.spans["id"].n_unique() == 2
    assert any("started 2 times" in text for text in data.missing)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (112, struct.pack("<4q", 2**63 - 1, 2**63 - 1, -(2**63), 2**63 - 1), "clocks of"),
        (112, bytes(32), "clocks of 0 ns"),
        (256, struct.pack("<2Q", 2**60, 2**60), "lane 0 at 1152921504606846976"),
        (264, bytes(8), "lane 0 at"),  # no room for a single record
        (32, struct.pack("<2Q", 4096, 2**62), "facts at 4096"),
        (48, struct.pack("<Q", 2**62), "strings at"),
        (64, struct.pack("<Q", 2**63), "bytes of strings"),
        (96, struct.pack("<i", 2**31 - 1), "rank 2147483647 of 2"),
        (104, struct.pack("<i", 2**31 - 1), "2147483647 ranks"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(one, tmp_path, at, value, says):
    one.span("forward", 1, 2)
    one.buffer[at : at + len(value)] = value
    one.save()
    (tmp_path / "run.json").write_text('{"schema": "kansoku.run/1"}')
    data = read_run(tmp_path)
    assert (len(data.spans), data.facts.ranks) == (0, ())
    (said,) = [text for text in data.missing if text.startswith("n1-5.ring cannot be read")]
    assert "the header is damaged" in said
    assert says in said


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_named_and_never_waited_for(one, tmp_path, kind):
    one.span("forward", 1, 2)
    one.save()
    other = tmp_path / "n1-6.ring"
    if kind == "pipe":
        os.mkfifo(other)
    elif kind == "folder":
        other.mkdir()
    else:
        other.symlink_to(other)
    data = read_run(tmp_path)
    assert len(data.spans) == 1
    assert any(text.startswith("n1-6.ring cannot be read") for text in data.missing)


def test_records_with_impossible_times_are_left_out_and_counted(one, tmp_path):
    one.span("forward", 1, 2)
    for wrong in ({"start": 1 << 62, "end": None}, {"start": 5, "end": 1 << 61}):
        one.span("forward", **wrong)
    one.span("forward", 7, 8, step=2**31 - 1)
    one.save()
    data = read_run(tmp_path)
    assert data.spans["start_ns"].to_list() == [UNIX + 1]
    assert any("3 records with impossible times or numbers" in text for text in data.missing)


def test_a_copy_without_its_records_is_said(one, tmp_path):
    one.span("forward", 1, 2)
    one.save(as_copy(one)[:8192])
    assert any("ends before its records begin" in text for text in read_run(tmp_path).missing)


def test_facts_and_run_json_of_any_size_are_read(one, tmp_path):
    one.writer.set_facts(
        {"parameters": 10**400, "model_flops_per_step": 10**400, "tokens_per_step": float("nan")}
    )
    one.span("forward", 1, 2)
    one.save()
    text = json.dumps({"schema": "kansoku.run/1", "start_ns": 10**30, "end_ns": -5})
    (tmp_path / "run.json").write_text(text)
    facts = read_run(tmp_path).facts
    (rank,) = facts.ranks
    assert (rank.parameters, rank.model_flops_per_step, rank.tokens_per_step) == (None, None, None)
    assert (facts.start_ns, facts.end_ns) == (ANCHOR[1], None)


def started(folder, pid, rank, at, steps, *, grouped=True):
    """Write the ring of a process begun ``at`` ns after boot: so many steps of 10 ns."""
    part = Ring(folder / f"n1-{pid}-{at}.ring", rank=rank, pid=pid)
    anchor = (at, ANCHOR[1] + at)
    struct.pack_into("<4q", part.buffer, 112, *anchor, *anchor)
    struct.pack_into("<q", part.buffer, 168, at)
    if not grouped:
        part.writer.set_facts({"node": "n1", "run": "r", "groups": []})
    group = part.writer.intern("0")
    for step in range(steps):
        begin = at + 10 * step
        part.span("step", begin, begin + 10, step=step)
        part.span("collective", begin + 2, begin + 5, step=step, group=group, sequence=2 * step)
    part.save()


def test_ranks_started_again_go_on_counting(tmp_path):
    """An elastic restart: steps 0-3 and 0-4, then both ranks again from 0, at 1,000 ns."""
    started(tmp_path, 5, 0, 100, 4)
    started(tmp_path, 6, 1, 101, 5)
    started(tmp_path, 7, 0, 1_000, 3)
    started(tmp_path, 8, 1, 1_001, 3)
    data = read_run(tmp_path)
    steps = data.spans.filter(pl.col("kind") == "step").sort("start_ns")
    numbers = {r: steps.filter(pl.col("rank") == r)["step"].to_list() for r in (0, 1)}
    assert numbers == {0: [0, 1, 2, 3, 5, 6, 7], 1: [0, 1, 2, 3, 4, 5, 6, 7]}
    # Sequences went to 8 in the first life, so the second one's 0, 2, 4 are 9, 11, 13.
    met = data.spans.filter((pl.col("kind") == "collective") & (pl.col("rank") == 0))
    assert met.sort("start_ns")["sequence"].to_list() == [0, 2, 4, 6, 9, 11, 13]
    assert data.resources.filter(pl.col("rank") == 0)["step"].to_list() == numbers[0]
    said = [text for text in data.missing if "numbered on" in text]
    assert [text.split(" in this")[0] for text in said] == [
        "rank 0 was started 2 times", "rank 1 was started 2 times",
    ]  # fmt: skip


def test_a_program_that_replaces_itself_keeps_both_rings(tmp_path):
    """After exec pid and start of the process are the same: 4 steps, then 3 more."""
    started(tmp_path, 5, 0, 100, 4)
    started(tmp_path, 5, 0, 1_000, 3)
    steps = read_run(tmp_path).spans.filter(pl.col("kind") == "step")
    assert steps["step"].to_list() == [0, 1, 2, 3, 4, 5, 6]


def test_two_processes_of_one_rank_at_a_time_are_said(tmp_path):
    started(tmp_path, 5, 0, 100, 4)
    started(tmp_path, 6, 0, 110, 4)
    data = read_run(tmp_path)
    assert any("2 processes call themselves rank 0 at the same time" in t for t in data.missing)


def test_unrelated_trainings_at_once_are_not_mixed(tmp_path):
    """A script starts three without a process group; after them one more begins at 1,000 ns."""
    for pid, at, steps in ((5, 100, 4), (6, 105, 9), (7, 110, 5), (8, 1_000, 3)):
        started(tmp_path, pid, 0, at, steps, grouped=False)
    data = read_run(tmp_path)
    steps = data.spans.filter(pl.col("kind") == "step")
    assert steps["start_ns"].to_list() == [
        ANCHOR[1] + at for at in [*range(105, 195, 10), 1_000, 1_010, 1_020]
    ]
    assert [(p.rank, p.pid) for p in data.processes] == [(0, 6), (0, 8)]
    said = [text for text in data.missing if "rank 0" in text]
    assert said == [
        (
            "3 unrelated processes named themselves rank 0 at the same time: shown is pid 6, which "
            f"ran longest; of another one: kansoku report {tmp_path}/n1-5-100.ring, "
            f"{tmp_path}/n1-7-110.ring"
        ),
        "rank 0 was started 2 times in this run; its steps and collectives are numbered on",
    ]
    assert len(read_run(tmp_path / "n1-7-110.ring").spans) == 10  # 5 steps and their collectives


def test_a_stray_training_beside_the_job_does_not_stand_for_its_rank(tmp_path):
    started(tmp_path, 5, 0, 100, 4)
    started(tmp_path, 6, 1, 101, 4)
    started(tmp_path, 7, 0, 90, 50, grouped=False)
    data = read_run(tmp_path)
    assert [(p.rank, p.pid) for p in data.processes] == [(0, 5), (1, 6)]
    assert any("shown is pid 5, which is in a process group" in text for text in data.missing)


def test_nothing_there_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match="no run here: neither run"):
        read_run(tmp_path)


def test_files_that_are_no_rings_are_named(tmp_path):
    (tmp_path / "n1-5.ring").write_bytes(b"x" * 10_000)
    with pytest.raises(
        InputError, match=r"no run here: n1-5\.ring cannot be read: not a ring file"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/9"}', "\xff"])
def test_a_spoiled_run_json_costs_only_itself(one, tmp_path, text):
    one.span("forward", 1, 2)
    one.save()
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    data = read_run(tmp_path)
    assert len(data.spans) == 1
    assert any("run.json" in said for said in data.missing)


def test_run_json_gives_the_facts(one, tmp_path):
    one.save()
    facts = {
        "schema": "kansoku.run/1", "run": "a", "command": ["python", "x"], "start_ns": 4,
        "end_ns": 9, "exit_code": 137, "slurm_job": "12", "nodes": ["n1"], "missing": ["m"],
        "peak": {"flops": 1e9, "source": "measured", "precision": "float32"},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(facts))
    data = read_run(tmp_path)
    assert (data.facts.run, data.facts.exit_code, data.facts.slurm_job) == ("a", 137, "12")
    assert data.facts.command == ("python", "x")
    assert data.peak["flops"] == 1e9
    assert "m" in data.missing


def test_ends_of_processes_are_read_and_what_is_no_end_is_left_out(one, tmp_path):
    one.save()
    known = {"pid": 5, "rank": 0, "node": "n1", "exit_code": 3, "ended_ns": 10**18}
    signalled = known | {"pid": 6, "exit_code": None}
    there = known | {"pid": 7, "exit_code": None, "ended_ns": None}
    odd = [None, 3, {}, {"node": "n1"}, known | {"pid": "5"}]
    values = [*odd, known, signalled, there, known | {"pid": 8, "exit_code": 999, "ended_ns": -1}]
    run = {"schema": "kansoku.run/1", "run": "r", "processes": values}
    (tmp_path / "run.json").write_text(json.dumps(run))
    ends = read_run(tmp_path).facts.ends
    assert [(e.node, e.pid, e.exit_code, e.ended_ns) for e in ends] == [
        ("n1", 5, 3, 10**18), ("n1", 6, None, 10**18), ("n1", 7, None, None), ("n1", 8, None, None),
    ]  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run | {"processes": 3}))
    assert read_run(tmp_path).facts.ends == ()


def test_a_phase_without_peak_memory_keeps_its_run_queue_wait(one, tmp_path):
    """Peak memory is noted every eighth step, the wait for the CPU in every phase."""
    one.span("forward", 1_000, 2_000, value_a=500.0, peak_rss_bytes=4096, step=0)
    one.span("forward", 3_000, 4_000, value_a=700.0, step=1)
    one.save()
    waits = read_run(tmp_path).resources.sort("step")["queued_ns"].to_list()
    assert waits == [500, 700]


def test_the_newest_records_of_a_ring_that_wrapped_are_found_without_its_others(one, tmp_path):
    capacity = ring.read_header(one.buffer).lanes[0].capacity
    for number in range(capacity + 40):
        one.span("forward", number, number + 1, step=number)
    one.save()
    data = read_run(tmp_path, newest=100)
    assert data.spans["step"].to_list() == list(range(capacity - 60, capacity + 40))
    assert not [text for text in data.missing if "overwritten" in text]
    assert len(read_run(tmp_path, newest=10 * capacity).spans) == capacity
    assert read_run(tmp_path, newest=10 * capacity).spans.equals(read_run(tmp_path).spans)


LOOK = """
import os, sys
from pathlib import Path
from kansoku.formats.run_directory import open_ring
from kansoku.model import ring
buffer, header = open_ring(Path(sys.argv[1]))
os.truncate(sys.argv[1], 0)  # no page is behind a map any more, as with a hole on a full tmpfs
print(ring.read_facts(buffer, header)["node"], len(ring.read_strings(buffer, header)), len(buffer))
"""


@pytest.mark.parametrize("kind", ["copy with a hole", "ring with a hole"])
def test_no_look_at_a_file_with_holes_ends_us(one, kind):
    """A map of it would: SIGBUS."""
    one.writer.intern("name")
    one.span("forward", 1, 2)
    if kind == "copy with a hole":
        one.save(as_copy(one))
        size = one.path.stat().st_size + (1 << 20)
        os.truncate(one.path, size)
    else:
        one.save()
        size = len(one.buffer)
        with one.path.open("r+b") as stream:  # the last half, which holds zeros, as a hole
            stream.truncate(size // 2)
            stream.truncate(size)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(one.path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"n1 2 {size}\n"), done.stderr
