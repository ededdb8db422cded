"""The path of a rank's step: by hand, and that it always fills the step."""

import itertools
import random

import pytest

from kansoku.trace.host_path import HostSpan, LastArrival, host_path


def span(kind, start, end, **more):
    return HostSpan(kind=kind, name=more.pop("name", kind), start_ns=start, end_ns=end, **more)


def test_nested_spans_by_hand():
    key = ("0", "all_reduce", 3)
    path = host_path(
        7,
        100,
        200,
        [
            span("data_wait", 90, 110),  # begun in the step before
            span("forward", 110, 140),
            span("gc", 120, 125),
            span("backward", 140, 190),
            span("collective", 170, 185, name="all_reduce", collective=key),
        ],
        {key: LastArrival(rank=5, at_ns=180)},
    )
    assert path.segments == (
        ("host", "data_wait", 100, 110),
        ("compute", "forward", 110, 120),
        ("host", "gc", 120, 125),
        ("compute", "forward", 125, 140),
        ("compute", "backward", 140, 170),
        ("synchronisation", "wait for rank 5", 170, 180),
        ("communication", "all_reduce", 180, 185),
        ("compute", "backward", 185, 190),
        ("host", "", 190, 200),
    )
    assert path.bound_by == "compute"


@pytest.mark.parametrize("seed", range(20))
def test_any_spans_fill_the_step_in_any_order(seed):
    rng = random.Random(seed)
    kinds = ("forward", "backward", "optimizer", "collective", "checkpoint", "gc")
    spans, last = [], {}
    for number in range(rng.randrange(40)):
        start = rng.randrange(-50, 1000)
        key = ("g", "op", number)
        spans.append(span(rng.choice(kinds), start, start + rng.randrange(0, 200), collective=key))
        if rng.random() < 0.5:
            last[key] = LastArrival(rank=1, at_ns=rng.randrange(-100, 1200))
    path = host_path(None, 0, 900, spans, last)
    assert sum(path.totals_ns.values()) == 900
    assert all(value >= 0 for value in path.totals_ns.values())
    edges = [(low, high) for _, _, low, high in path.segments]
    assert edges[0][0] == 0
    assert edges[-1][1] == 900
    assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))
    rng.shuffle(spans)
    assert host_path(None, 0, 900, spans, last).totals_ns == path.totals_ns
