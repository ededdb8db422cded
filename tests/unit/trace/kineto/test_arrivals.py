"""Stragglers planted in made-up collectives, with clocks that lie."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.trace.kineto.arrivals import Arrival, ArrivalPolicy, find_stragglers

T0 = 1_700_000_000_000_000_000


def job(
    *, ranks=8, count=60, late=None, offsets=None, noise=20_000, seed=0, sequence=True, group="0"
):
    """Members arrive within noise; late ranks arrive later; all leave 1 ms after the last."""
    rng = random.Random(seed)
    out = {rank: [] for rank in range(ranks)}
    now = T0
    for number in range(count):
        arrivals = {r: now + rng.randrange(noise) + (late or {}).get(r, 0) for r in range(ranks)}
        end = max(arrivals.values()) + 1_000_000
        for rank, start in arrivals.items():
            shift = (offsets or {}).get(rank, 0)
            out[rank].append(
                Arrival(
                    operation="all_reduce",
                    group=group,
                    sequence=number if sequence else None,
                    start_ns=start + shift,
                    end_ns=end + shift + rng.randrange(2000),
                )
            )
        now = end + 5_000_000
    return out


def test_a_late_rank_is_named():
    report = find_stragglers(job(late={3: 500_000}))
    assert report.verdict == "found"
    (only,) = report.stragglers
    assert only.rank == 3
    assert only.lateness_ns == pytest.approx(500_000, rel=0.05)
    assert only.share > 0.95
    assert only.confidence > 0.99


def test_nobody_is_named_in_a_healthy_job():
    for seed in range(5):
        assert find_stragglers(job(seed=seed)).verdict == "none"


def test_clocks_that_differ_by_seconds_do_not_matter():
    offsets = {rank: rank * 3_000_000_000 for rank in range(8)}
    report = find_stragglers(job(late={5: 300_000}, offsets=offsets))
    assert [s.rank for s in report.stragglers] == [5]
    assert report.offsets_ns[7] - report.offsets_ns[0] == pytest.approx(-21_000_000_000, abs=3000)


def test_two_stragglers_that_take_turns():
    rows = job(late={2: 400_000}, count=40)
    more = job(late={6: 400_000}, count=40, seed=9)
    for rank, items in more.items():
        rows[rank] += [
            Arrival(
                operation=a.operation,
                group="1",
                sequence=a.sequence,
                start_ns=a.start_ns + 10**12,
                end_ns=a.end_ns + 10**12,
            )
            for a in items
        ]
    assert {s.rank for s in find_stragglers(rows).stragglers} == {2, 6}


def test_one_rank_alone_is_unknown():
    report = find_stragglers({0: job()[0]})
    assert report.verdict == "unknown"
    assert "two ranks" in report.reason


def test_too_few_collectives_are_unknown():
    assert find_stragglers(job(count=2, late={1: 10**6})).verdict == "unknown"


def test_lists_of_unequal_length_are_matched_by_their_ends():
    rows = job(late={4: 500_000}, sequence=False, group=None, offsets={1: 7_000_000})
    rows[1] = rows[1][5:]
    rows[2] = rows[2][:-7]
    report = find_stragglers(rows)
    assert [s.rank for s in report.stragglers] == [4]
    assert max(c.end_spread_ns for c in report.collectives) < 10_000


def test_ends_that_do_not_agree_are_not_used():
    rows = job()
    rows[0] = [
        Arrival(
            operation=a.operation,
            group=a.group,
            sequence=a.sequence,
            start_ns=a.start_ns,
            end_ns=a.end_ns + (number % 2) * 40_000_000,
        )
        for number, a in enumerate(rows[0])
    ]
    report = find_stragglers(rows)
    assert len(report.collectives) <= 30


def test_groups_are_joined_through_common_ranks():
    left = job(ranks=4, group="a", late={1: 400_000})
    right = job(ranks=4, group="b", seed=3, offsets=dict.fromkeys(range(4), 9_000_000))
    rows = dict(left)
    for rank, items in right.items():
        rows.setdefault(rank + 3, [])
        rows[rank + 3] = [*rows[rank + 3], *items]
    report = find_stragglers(rows)
    assert [s.rank for s in report.stragglers] == [1]
    assert report.offsets_ns[6] - report.offsets_ns[3] == pytest.approx(0, abs=4000)


def test_lateness_below_the_policy_is_not_named():
    policy = ArrivalPolicy(min_lateness_ns=1_000_000)
    assert find_stragglers(job(late={3: 500_000}), policy).verdict == "none"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_order_of_rows_never_matters(seed):
    rows = job(late={3: 200_000}, count=12)
    shuffled = {rank: random.Random(seed).sample(items, len(items)) for rank, items in rows.items()}
    keys = list(shuffled)
    random.Random(seed).shuffle(keys)
    assert find_stragglers({rank: shuffled[rank] for rank in keys}) == find_stragglers(rows)
