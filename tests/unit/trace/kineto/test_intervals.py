"""Interval arithmetic against a brute-force count of nanoseconds."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kansoku.trace.kineto.intervals import gaps, intersect, union

ROWS = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 30)), max_size=25)


def cells(rows):
    return {t for start, length in rows for t in range(start, start + length)}


def made(rows):
    array = np.array(rows, np.int64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


@given(ROWS)
def test_union_counts_each_nanosecond_once(rows):
    found = made(rows)
    assert found.total_ns == len(cells(rows))
    assert np.all(found.ends > found.starts)
    assert np.all(found.starts[1:] > found.ends[:-1])


@given(ROWS, st.randoms())
def test_order_never_matters(rows, shuffler):
    other = list(rows)
    shuffler.shuffle(other)
    one, two = made(rows), made(other)
    assert one.starts.tolist() == two.starts.tolist()
    assert one.ends.tolist() == two.ends.tolist()


@given(ROWS, ROWS)
def test_intersection(a, b):
    found = intersect(made(a), made(b))
    assert found.total_ns == len(cells(a) & cells(b))
    assert np.all(found.ends > found.starts)
    assert np.all(found.starts[1:] > found.ends[:-1])


@given(ROWS, st.integers(-60, 90), st.integers(0, 60))
def test_window(rows, start, length):
    window = set(range(start, start + length))
    assert made(rows).within(start, start + length) == len(cells(rows) & window)


@given(ROWS, st.lists(st.integers(-60, 90), max_size=6))
def test_windows_partition_the_whole(rows, cuts):
    edges = [-100, *sorted(cuts), 200]
    found = made(rows)
    parts = sum(found.within(a, b) for a, b in itertools.pairwise(edges))
    assert parts == found.total_ns


@given(ROWS)
def test_gaps_and_busy_fill_the_span(rows):
    found = made(rows)
    if found.total_ns:
        assert gaps(found).total_ns + found.total_ns == found.ends[-1] - found.starts[0]
