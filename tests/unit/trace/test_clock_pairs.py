"""Bounds between clocks, by hand: no end before all have started, and the transfer takes its time."""

import polars as pl
import pytest

from kansoku.trace.clock_pairs import pair_up, tightened


def two_hosts(collectives):
    """Host 0 is in from 0 to 400 ns, host 1 from 100 to 420 ns, every microsecond."""
    rows = [
        (number, host, 1000.0 * number + start, 1000.0 * number + end)
        for number in range(collectives)
        for host, start, end in ((0, 0, 400), (1, 100, 420))
    ]
    names = ["sequence", "host", "start", "end"]
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(group=0, kind=0)


def test_ends_and_starts_of_a_pair_bound_its_clocks():
    pairs = pair_up(two_hosts(20))
    assert len(pairs) == 20
    assert set(pairs.apart) == {-20.0}
    assert set(pairs.upper) == {300.0}  # end of 0 less start of 1
    assert set(pairs.lower) == {-420.0}  # start of 0 less end of 1


@pytest.mark.parametrize(("collectives", "least"), [(20, 80.0), (19, 0.0)])
def test_the_transfer_tightens_the_bounds_where_it_was_seen_often(collectives, least):
    """Nobody was in for less than 320 ns (host 1): a quarter of it, from twenty collectives on."""
    shared = two_hosts(collectives)
    pairs = tightened(pair_up(shared), shared)
    assert set(pairs.upper) == {300.0 - least}
    assert set(pairs.lower) == {-420.0 + least}


def test_in_a_large_group_each_collective_pairs_some_partners_and_all_hosts_are_joined():
    """600 hosts in 2,000 collectives would be 10.8 million pairs of nine distances."""
    hosts, collectives = 600, 2000
    shared = pl.DataFrame({"sequence": range(collectives)}, schema={"sequence": pl.Int64}).join(
        pl.DataFrame({"host": range(hosts)}), how="cross"
    )
    start = pl.col("sequence").cast(pl.Float64) * 1000
    shared = shared.with_columns(group=0, kind=0, start=start, end=start + 400)
    pairs = pair_up(shared)
    assert len(pairs) < 500_000
    assert set(pairs.first) | set(pairs.second) == set(range(hosts))
    distances = {min(d, hosts - d) for d in set((pairs.second - pairs.first).tolist())}
    assert distances == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    # Of one collective a host says as much as one end can.
    assert pairs.share.max() * 600 * 9 / 4 < 2 * 600
