"""Which collective caused a burst, and what probes saw: by hand."""

import polars as pl

from kansoku.burst.align import blame, probes_beside, shares
from kansoku.model import table_schema

MS = 1_000_000


def frame(table, rows):
    return pl.DataFrame(rows, schema=table_schema(table))


def burst(start_ms, length_ms, size=100):
    return {"node": "a", "port": "n0", "direction": "transmit", "start_ns": start_ms * MS,
            "duration_ns": length_ms * MS, "bytes": size, "samples": length_ms}  # fmt: skip


def span(kind, name, start_ms, length_ms, **more):
    return {"kind": kind, "name": name, "start_ns": start_ms * MS, "rank": 0,
            "duration_ns": None if length_ms is None else length_ms * MS, **more}  # fmt: skip


SPANS = frame("spans", [
    span("backward", "backward", 0, 100, step=1),
    span("collective", "all_reduce", 10, 20, group="dp", sequence=1, step=1),
    span("collective", "reduce_scatter", 28, 40, group="tp", sequence=9, step=1),
    span("collective", "all_gather", 500, None, group="dp", sequence=2, step=2),
    span("optimizer", "optimizer", 100, 50, step=1),
])  # fmt: skip


def test_the_longest_overlap_is_blamed():
    bursts = frame("bursts", [burst(12, 10, 300), burst(29, 20, 100), burst(120, 5, 100),
                              burst(300, 5, 500)])  # fmt: skip
    answer = blame(bursts, SPANS)
    assert answer["collective"].to_list() == ["all_reduce", "reduce_scatter", None, None]
    assert answer["group"].to_list() == ["dp", "tp", None, None]
    assert answer["sequence"].to_list() == [1, 9, None, None]
    assert answer["phase"].to_list() == ["backward", "backward", "optimizer", None]
    assert answer["step"].to_list() == [1, 1, 1, None]
    assert answer["overlap_ratio"].to_list() == [1.0, 1.0, None, None]
    first, second, *_ = shares(answer)
    assert (first.collective, first.bytes_ratio, first.bursts) == (None, 0.5, 1)
    assert (second.collective, second.bytes_ratio) == ("all_reduce", 0.3)


def test_what_leaves_a_little_later_counts_within_the_slack():
    bursts = frame("bursts", [burst(69, 2)])
    assert blame(bursts, SPANS, slack_ns=0)["collective"].to_list() == [None]
    late = blame(bursts, SPANS, slack_ns=2 * MS)
    assert late["collective"].to_list() == ["reduce_scatter"]
    assert late["overlap_ratio"].to_list() == [0.5]


def test_no_spans_and_no_bursts():
    bursts = frame("bursts", [burst(1, 1)])
    assert blame(bursts, SPANS.clear())["collective"].to_list() == [None]
    assert shares(blame(bursts.clear(), SPANS)) == []


def probe(time_ms, rtt_ms, **more):
    return {"time_ns": time_ms * MS, "source": "a/n0", "target": "b/n0", "probes": 1, "lost": 0,
            "rtt_p50_ns": None if rtt_ms is None else round(rtt_ms * MS), **more}  # fmt: skip


def test_single_probes_inside_and_outside_bursts():
    bursts = frame("bursts", [burst(100, 10), burst(200, 10)])
    rows = [probe(t, 0.1) for t in range(0, 100, 10)]
    rows += [probe(t, 7.0) for t in (101, 105, 205)]
    rows += [probe(99, 5.0), probe(208, None, lost=1), {**probe(5, 99), "source": "x/n0",
                                                        "target": "y/n0"}]  # fmt: skip
    (beside,) = probes_beside(bursts, frame("probes", rows))
    assert (beside.inside, beside.outside) == (5, 10)  # 99 ms was under way when the burst began
    assert beside.rtt_inside_ns[0] == 7 * MS  # of 7, 7, 7 and 5
    assert beside.rtt_outside_ns[0] == MS // 10
    assert (beside.lost_inside, beside.lost_outside) == (1, 0)
    assert beside.rank_correlation is None


def test_windows_are_ranked_against_each_other():
    bursts = frame("bursts", [burst(1000 * n, 10 * n) for n in range(1, 7)])
    rows = [
        probe(1000 * n, 0.1, window_ns=1000 * MS, rtt_p99_ns=n * MS, probes=50)
        for n in range(1, 7)
    ]  # fmt: skip
    (beside,) = probes_beside(bursts, frame("probes", rows))
    assert beside.rank_correlation == 1.0
    assert beside.inside == 6
