"""Who ended first in a job that failed: exit codes where they were seen, else closed records."""

import json
import os

import pytest

from kansoku.app.report import report
from kansoku.model import ring

UNIX = 1_700_000_000_000_000_000
MS = 1_000_000


def record(
    folder,
    rank,
    *,
    last_ms,
    closed,
    node="lost",
    steps=3,
    cut=True,
    pid=None,
    begun_ms=1,
    inside=None,
):
    """Write a rank's ring: steps of 10 ms, and one open or cut off at its last sign of life.

    ``inside`` is a phase that the open step had begun with it and not ended.
    """
    buffer, pid = bytearray(1 << 17), pid or 100 + rank
    anchor = (begun_ms * MS, UNIX + begun_ms * MS)
    ring.format_ring(buffer, pid=pid, process_start=9, anchor=anchor, lane_shares=(1,))
    writer = ring.RingWriter(buffer)
    writer.set_ranks(rank, rank, 2)
    writer.set_facts({"node": node, "run": "r", "groups": [{"name": "0", "ranks": [0, 1]}]})
    template = ring.pack_template(ring.KIND_CODES["step"])
    for step in range(steps or 0):
        begin = (1 + 10 * step) * MS
        writer.close(writer.open(template, begin, step, 0), begin, begin + 10 * MS, -1)
    if steps and cut:
        begin = (1 + 10 * steps) * MS
        flags = ring.FLAG_INCOMPLETE if closed else 0
        template = ring.pack_template(ring.KIND_CODES["step"], flags=flags)
        span = writer.open(template, begin, steps, 0)
        if closed:
            writer.close(span, begin, last_ms * MS, -1)
    if inside:
        writer.open(ring.pack_template(ring.KIND_CODES[inside]), begin, steps, span)
    if closed:
        writer.set_state(ring.CLOSED)
    now = -1 if steps is None else steps
    writer.set_now(step=now, phase=0, main_thread=1, alive_ns=last_ms * MS)
    (folder / f"{node}-{pid}.ring").write_bytes(buffer)


def answer(folder, **changes):
    run = {"schema": "kansoku.run/1", "run": "r", "command": ["torchrun"], "start_ns": UNIX,
           "end_ns": UNIX + 10**9, "exit_code": None, "nodes": ["lost"]} | changes  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return report(folder)


def node():
    """Return the name of this machine: the processes of the records are looked for here."""
    return os.uname().nodename


def end(rank, code, ended_ms):
    return {"pid": 100 + rank, "rank": rank, "node": "lost", "exit_code": code,
            "ended_ns": None if ended_ms is None else UNIX + ended_ms * MS}  # fmt: skip


def said(found):
    return {f.id: f.sentence for f in found.findings if f.id.startswith(("rank.", "job."))}


def test_the_rank_that_exited_is_named_and_not_its_victim(tmp_path):
    """Rank 1 exits with 3 at 50 ms; torchrun ends rank 0 with SIGTERM 0.3 s later."""
    record(tmp_path, 0, last_ms=300, closed=False)
    record(tmp_path, 1, last_ms=50, closed=True)
    launcher = {"pid": 7, "rank": None, "node": "lost", "exit_code": 1, "ended_ns": UNIX}
    found = answer(tmp_path, processes=[launcher, end(0, None, 350), end(1, 3, 50)])
    assert said(found) == {
        "rank.ended_first": "Rank 1 (pid 101 on lost) exited with code 3 in step 3, 0.3 s before "
        "rank 0 was ended by a signal.",
        "rank.ended_after": "Rank 0 (pid 100 on lost) ended without closing its record, after "
        "rank 1 had ended, as where a launcher ends who is left; it was between phases of step 3.",
    }
    assert str(found.findings[0].subject) == "rank:1"
    states = {s["rank"]: s for s in found.to_json()["job"]["last_states"]}
    assert (states[1]["exit_code"], states[0]["exit_code"]) == (3, None)


def test_what_it_was_in_lasted_until_its_own_end(tmp_path):
    """The run went on to 1,000 ms; rank 0 was in a backward from 31 ms to its end at 231 ms."""
    record(tmp_path, 0, last_ms=31, closed=False, inside="backward")
    record(tmp_path, 1, last_ms=50, closed=True)
    found = said(answer(tmp_path, processes=[end(0, None, 231), end(1, 3, 50)]))
    assert found["rank.ended_after"].endswith("it was in backward of step 3 for 0.2 s.")


def test_ends_too_near_have_no_order(tmp_path):
    record(tmp_path, 0, last_ms=300, closed=False)
    record(tmp_path, 1, last_ms=300, closed=False)
    found = said(answer(tmp_path, processes=[end(0, None, 340), end(1, None, 320)]))
    assert found["rank.ended_first"] == (
        "Rank 1 (pid 101 on lost) was ended by a signal in step 3; rank 0 ended within 0.1 s of "
        "it, so which was first is not sure."
    )
    assert "rank.ended_after" not in found


@pytest.mark.parametrize(
    "processes", [[end(0, 0, 300), end(1, 0, 310)], [end(0, None, None), end(1, 0, 310)]]
)
def test_ends_in_order_are_no_finding(tmp_path, processes):
    record(tmp_path, 0, last_ms=300, closed=True)
    record(tmp_path, 1, last_ms=310, closed=True)
    assert said(answer(tmp_path, processes=processes)) == {}


def test_without_exit_codes_a_closed_record_tells_who_was_first(tmp_path):
    """As ``kansoku run`` leaves it: rank 1 closed its record, rank 0 still wrote 250 ms later."""
    record(tmp_path, 0, last_ms=300, closed=False, node=node())
    record(tmp_path, 1, last_ms=50, closed=True, node=node())
    found = said(answer(tmp_path, exit_code=1))
    assert found["rank.ended_first"] == (
        f"Rank 1 (pid 101 on {node()}) was the first to end: it closed its record in step 3, "
        "0.2 s before the last sign of life of rank 0."
    )
    assert "after the record of rank 1 had ended" in found["rank.ended_after"]


def test_of_a_record_closed_between_steps_the_last_word_is_told(tmp_path, monkeypatch):
    """Rank 1 ended its last step at 31 ms and closed its record at an unknown time after it."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "GPU-01", "", "", "")))
    record(tmp_path, 0, last_ms=300, closed=False, node=node())
    record(tmp_path, 1, last_ms=31, closed=True, node=node(), cut=False)
    found = said(answer(tmp_path, exit_code=1))
    assert found["rank.ended_first"] == (
        "The record of rank 1 (pid 101 on GPU-01) ends first, in order, in step 2: rank 0 went on "
        "for 0.3 s and more."
    )
    assert "after the record of rank 1 had ended" in found["rank.ended_after"]
    record(tmp_path, 0, last_ms=120, closed=False, node=node())  # 89 ms: may be anything
    assert "rank.ended_first" not in said(answer(tmp_path, exit_code=1))


def test_a_process_that_recorded_nothing_has_no_state_of_the_one_before(tmp_path):
    record(tmp_path, 0, last_ms=50, closed=False, node=node())
    record(tmp_path, 0, last_ms=900, closed=False, node=node(), steps=None, pid=200, begun_ms=900)
    (rank,) = answer(tmp_path, exit_code=1).box.ranks
    assert (rank.pid, rank.state.step, rank.state.path) == (200, None, ())


def test_an_order_that_no_record_shows_is_not_invented(tmp_path):
    """Rank 0 died at some time after 40 ms; rank 1 closed its record at 50 ms."""
    record(tmp_path, 0, last_ms=40, closed=False, node=node())
    record(tmp_path, 1, last_ms=50, closed=True, node=node())
    found = said(answer(tmp_path, exit_code=1))
    assert set(found) == {"rank.gone", "job.failed"}
    assert "as after SIGKILL or a crash" in found["rank.gone"]
