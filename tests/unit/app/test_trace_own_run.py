"""Our own run directories through the same commands: figures by hand from the spans written."""

import polars as pl
import pytest
from tests.labs.kineto_files import Job, text, write

from kansoku.app._trace_own_run import _missing_of
from kansoku.app.report import report
from kansoku.app.trace import breakdown, compare, convert, critical_path, stragglers
from kansoku.errors import InputError
from kansoku.model import ring

MS = 1_000_000
ANCHOR = (1_000, 1_700_000_000_000_000_000)


def write_rank(folder, rank, *, late_ns=0, node="n1", clock_ns=0, leaves_ns=0):
    """Ten steps of 40 ms: forward 10 (+ late), backward 20 of which 5 or less in an all-reduce.

    ``clock_ns``: how far the node's clock is ahead; ``leaves_ns``: how late the rank leaves.
    """
    buffer = bytearray(1 << 17)
    anchor = (ANCHOR[0], ANCHOR[1] + clock_ns)
    ring.format_ring(buffer, pid=5 + rank, process_start=9, anchor=anchor, lane_shares=(1,))
    writer = ring.RingWriter(buffer)
    writer.set_ranks(rank, rank, 4)
    writer.set_facts({"node": node, "run": "r", "groups": [{"name": "0", "ranks": [0, 1, 2, 3]}]})
    group, name = writer.intern("0"), writer.intern("all_reduce")

    def span(kind, start, end, step, parent=0, **fields):
        one = writer.open(ring.pack_template(ring.KIND_CODES[kind], **fields), start, step, parent)
        writer.close(one, start, end, -1)
        return one

    for number in range(10):
        begin = 10_000 + number * 40 * MS
        step = span("step", begin, begin + 40 * MS, number)
        span("forward", begin, begin + 10 * MS + late_ns, number, step)
        back = span("backward", begin + 10 * MS + late_ns, begin + 30 * MS, number, step)
        span(
            "collective",
            begin + 25 * MS + late_ns,
            begin + 30 * MS + leaves_ns,
            number,
            back,
            group=group,
            name=name,
            sequence=number,
            bytes_=1 << 20,
        )
    folder.mkdir(exist_ok=True)
    (folder / f"n1-{5 + rank}.ring").write_bytes(buffer)


@pytest.fixture
def run(tmp_path):
    for rank in range(4):
        write_rank(tmp_path / "run", rank, late_ns=3 * MS if rank == 2 else 0)
    return tmp_path / "run"


def test_what_one_rank_lacks_is_said_of_it_alone():
    missing = ["rank 0: no tokens", "rank 1: no tokens", "rank 10: no ring", "run.json is missing"]
    assert _missing_of(missing, 1, [0, 1]) == ("no tokens", "rank 10: no ring", missing[3])


def test_breakdown(run):
    answer = breakdown([run]).to_json()
    rows = {row["rank"]: row for row in answer["ranks"]}
    assert sorted(rows) == [0, 1, 2, 3]
    assert rows[0]["span_us"] == 400_000
    assert rows[0]["exposed_comm_us"] == rows[0]["comm_us"] == 50_000
    assert rows[0]["compute_us"] == 250_000
    assert rows[0]["idle_us"] == 100_000
    assert rows[2]["comm_us"] == 20_000
    assert rows[0]["memory_us"] is None
    assert len(answer["steps"]) == 40
    assert len(answer["collectives"]) == 40
    assert any("host's clock" in note["note"] for note in answer["notes"])


def test_stragglers(run):
    answer = stragglers([run]).to_json()
    assert answer["verdict"] == "found"
    assert [(row["rank"], row["lateness_us"]) for row in answer["stragglers"]] == [(2, 3000.0)]


def test_a_rank_that_leaves_late_is_not_taken_for_a_clock(tmp_path):
    """0.1 ms after its peers each time, on their host: its arrivals are where they were."""
    for rank in range(4):
        write_rank(
            tmp_path / "run",
            rank,
            late_ns=3 * MS if rank == 2 else 0,
            leaves_ns=100_000 if rank == 1 else 0,
        )
    answer = stragglers([tmp_path / "run"]).to_json()
    assert {row["offset_us"] for row in answer["clock_offsets_us"]} == {0.0}
    for row in answer["arrivals"]:
        assert dict(zip(row["ranks"], row["after_first_us"], strict=True)) == {
            0: 0.0, 1: 0.0, 3: 0.0, 2: 3000.0,
        }  # fmt: skip
        assert row["end_spread_us"] == 100.0


def test_clocks_of_two_hosts_are_brought_together_as_in_the_report(tmp_path):
    """Host n2 is 20 ms ahead; as read, its ranks 2 and 3 would come last to everything."""
    for rank in range(4):
        late = 3 * MS if rank == 1 else 0
        node, ahead = ("n1", 0) if rank < 2 else ("n2", 20 * MS)
        write_rank(tmp_path / "run", rank, late_ns=late, node=node, clock_ns=ahead)
    answer = stragglers([tmp_path / "run"]).to_json()
    assert [(row["rank"], row["lateness_us"]) for row in answer["stragglers"]] == [(1, 3000.0)]
    added = {row["rank"]: row["offset_us"] for row in answer["clock_offsets_us"]}
    assert added == {0: 0.0, 1: 0.0, 2: -20_000.0, 3: -20_000.0}
    said = report(tmp_path / "run").to_json()["job"]["clocks"]["hosts"]
    assert [(host["host"], host["ranks"], host["offset_us"]) for host in said] == [
        ("n1", [0, 1], 0.0),
        ("n2", [2, 3], 20_000.0),
    ]


def test_convert(run, tmp_path):
    convert([run], to="parquet", out=tmp_path / "t.parquet")
    assert pl.read_parquet(tmp_path / "t.parquet").height == 160
    result = convert([run], to="kineto", out=tmp_path / "kineto")
    assert len(result.files) == 4
    back = breakdown([tmp_path / "kineto"]).to_json()
    assert [row["rank"] for row in back["ranks"]] == [0, 1, 2, 3]
    result = convert([run], to="perfetto", out=tmp_path / "t.perfetto-trace")
    assert result.files[0][1] == 160


def test_critical_path_tells_waiting_from_transfer(run):
    answer = critical_path([run]).to_json()
    rows = {(row["rank"], row["step"]): row for row in answer["paths"]}
    assert len(rows) == 40
    # Forward 10 and backward 15 outside the all-reduce; 5 in it, of which 3 wait for rank 2.
    early, late = rows[0, 4], rows[2, 4]
    assert early["span_us"] == late["span_us"] == 40_000
    assert (early["compute_us"], late["compute_us"]) == (25_000, 28_000)
    assert (early["synchronisation_us"], late["synchronisation_us"]) == (3_000, 0)
    assert (early["communication_us"], late["communication_us"]) == (2_000, 2_000)
    assert (early["host_us"], late["host_us"]) == (10_000, 10_000)
    waits = {
        row["name"]: row["total_us"]
        for row in answer["rows"]
        if (row["rank"], row["step"], row["kind"]) == (0, 4, "synchronisation")
    }
    assert waits == {"wait for rank 2": 3_000.0}
    whole = critical_path([run], steps=False).to_json()["paths"]
    assert [(row["rank"], row["span_us"]) for row in whole] == [(n, 400_000) for n in range(4)]
    assert any("main thread" in why for why in answer["incomplete"])


def test_compare_finds_the_slower_phase(run, tmp_path):
    for rank in range(4):
        write_rank(tmp_path / "other", rank, late_ns=3 * MS)
    found = {(row.what, row.name): row for row in compare(run, tmp_path / "other").found}
    # Three of four ranks spend 3 ms more in forward and 3 ms less in the all-reduce.
    forward, collective = found["phase", "forward"], found["phase", "collective"]
    assert forward.difference_ns == pytest.approx(3 * MS * 3 / 4)
    assert collective.difference_ns == pytest.approx(-3 * MS * 3 / 4)
    assert (forward.reason, collective.reason) == ("slower", "faster")
    assert found["phase", "optimizer"].significant is not True
    assert found["collective", "all_reduce 1048576 B"].reason == "faster"
    assert all(not row.significant for row in compare(run, run).found)


def test_compare_refuses_a_run_and_a_trace(run, tmp_path):
    trace = write(tmp_path / "rank0.json", text(Job()))
    with pytest.raises(InputError, match="no names in common"):
        compare(run, trace)
