"""The steps that are kept between pictures tell what the same rows tell when summed up anew."""

import random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.app._top_ranks import rank_lines, tokens_per_s
from kansoku.app._top_window import STEP_COLUMNS, RankWindow, RecentSteps
from kansoku.app.top import StoreSource
from kansoku.model import PHASES, table_schema

S = 10**9
NOW = 500_000 * 3600 * S


def row(rank, step, start_ns, *, took_ns=S, wait_ns=0, **more):
    phases = {f"{phase.value}_ns": 0 for phase in PHASES}
    phases |= {"collective_ns": wait_ns, "forward_ns": took_ns - wait_ns}
    return {
        "rank": rank, "step": step, "start_ns": start_ns, "duration_ns": took_ns,
        "complete": True, "tokens": 100.0, **phases, **more,
    }  # fmt: skip


def frame(rows):
    schema = {name: kind for name, kind in table_schema("steps").items() if name in STEP_COLUMNS}
    return pl.DataFrame(rows, schema=schema).select(STEP_COLUMNS)


def plainly(lines):
    return [
        (one.rank, one.step, one.step_ms, one.phases, list(one.trend), one.late) for one in lines
    ]


class Server:
    """Steps that have arrived so far; tells how many rows each answer had."""

    def __init__(self):
        self.rows = []
        self.asked = []

    def table(self, name, since_ns, until_ns, filters):
        assert (name, filters) == ("steps", {"run": "r"})
        found = [one for one in self.rows if since_ns <= one["start_ns"] < until_ns]
        self.asked.append(len(found))
        return frame(sorted(found, key=lambda one: one["start_ns"]))


def pictures(scene, seconds):
    """Return after each second what is shown, and what the last minute's rows say by themselves."""
    server = Server()
    source = StoreSource(store=server, title="t")
    for n in range(seconds):
        now = NOW + n * S
        server.rows += scene(n)
        shown = source._of_run("r", {}, now)
        whole = frame(
            sorted(
                (one for one in server.rows if now - 60 * S <= one["start_ns"] < now),
                key=lambda one: one["start_ns"],
            )
        )
        lines = rank_lines(whole, {})
        assert plainly(shown.ranks) == plainly(lines), n
        assert shown.tokens_per_s == pytest.approx(tokens_per_s(whole, lines)), n
        yield shown, server.asked[-1]


def second(n, ranks, **more):
    return [row(r, n, NOW + (n - 1) * S, wait_ns=n * 1000 + r, **more) for r in ranks]


def test_a_second_costs_a_second():
    """Of eighty seconds of eight ranks few rows are read twice."""
    seen = list(pictures(lambda n: second(n, range(8)), 80))
    last, _ = seen[-1]
    # Sixty steps began within the last minute, the newest one second ago.
    assert [(one.step, len(one.trend)) for one in last.ranks] == [(79, 60)] * 8
    asked = [rows for _, rows in seen]
    assert asked.count(8) >= 60  # a step of each rank
    # Looking back fifteen seconds from the newest step known, which began two seconds ago.
    assert max(asked[31:60]) == 8 * 17
    # A step takes a second: eight ranks of a hundred tokens each.
    assert last.tokens_per_s == pytest.approx(800)


def test_a_minute_of_many_steps_shows_the_newest_sixty():
    def scene(n):
        return [
            row(r, 4 * n + k, NOW + (n - 1) * S + k * S // 4, took_ns=S // 4, wait_ns=n + k)
            for r in range(3)
            for k in range(4)
        ]

    (*_, (last, _)) = pictures(scene, 70)
    assert [len(one.trend) for one in last.ranks] == [60] * 3


def test_a_rank_that_vanishes_leaves_the_picture_after_a_minute():
    seen = list(pictures(lambda n: second(n, range(3) if n < 20 else range(2)), 100))
    assert [one.rank for one in seen[70][0].ranks] == [0, 1, 2]
    assert [one.rank for one in seen[85][0].ranks] == [0, 1]


def test_a_rank_that_restarts_does_its_steps_again():
    """From second 33 on rank 1 starts over at step 23: steps 23 to 32 are done twice."""

    def scene(n):
        own = n if n < 33 else n - 10
        return [*second(n, [0]), row(1, own, NOW + (n - 1) * S, took_ns=S + n)]

    seen = list(pictures(scene, 110))
    assert seen[35][0].ranks[1].step == 32
    assert seen[45][0].ranks[1].step == 35
    assert min(rows for _, rows in seen[-5:]) == 2  # back to reading what is new


def test_a_rank_that_joins_late_is_shown_with_what_it_did_before():
    """Its node's first message comes in second 40 and holds ten seconds."""

    def scene(n):
        if n < 40:
            return second(n, range(2))
        late = [one for m in range(30, 40) for one in second(m, [2])] if n == 40 else []
        return second(n, range(3)) + late

    seen = list(pictures(scene, 50))
    assert len(seen[-1][0].ranks[2].trend) == 20


def test_messages_that_are_late_are_not_missed():
    """Rank 2 sends every seven seconds; each time its seven steps are there at once."""

    def scene(n):
        sent = [one for m in range(n - 6, n + 1) for one in second(m, [2])] if n % 7 == 6 else []
        return second(n, range(2)) + sent

    list(pictures(scene, 75))


def test_a_message_that_was_overtaken_is_found_in_the_gap():
    """Rank 1's step 30 arrives three seconds after its step 31."""

    def scene(n):
        rows = second(n, [0] if n == 30 else range(2))
        return rows + (second(30, [1]) if n == 34 else [])

    list(pictures(scene, 45))


@pytest.mark.parametrize("odd", [{"complete": False}, {"rank": None}, {"tokens": None}])
def test_odd_rows_change_nothing(odd):
    def scene(n):
        rows = second(n, range(3))
        if n == 33:
            rows[1] |= odd
        return rows

    list(pictures(scene, 100))


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_plain_steps_are_summed_up_the_same_in_any_portions(seed, ranks):
    """Whatever is lacking, however long a minute, in whatever order it came."""
    chance = random.Random(seed)
    rows = [
        row(r, s, NOW + s * S, took_ns=chance.randrange(1, 3 * S), wait_ns=chance.randrange(10**6),
            tokens=chance.choice([None, 100.0, 200.0]))
        for r in range(ranks) for s in range(chance.randrange(1, 90)) if chance.random() < 0.9
    ]  # fmt: skip
    recent = RecentSteps()
    first, rest = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    recent.replace(frame(first), 0)
    from_ns = NOW + chance.randrange(50) * S
    since = max(min((one["start_ns"] for one in rest), default=NOW), from_ns)
    recent.add(frame([one for one in rows if one["start_ns"] >= since]), since, from_ns=from_ns)
    whole = frame([one for one in rows if one["start_ns"] >= from_ns])
    lines = rank_lines(whole, {})
    assert plainly(recent.lines({})) == plainly(lines)
    found, wanted = recent.tokens_per_s(lines), tokens_per_s(whole, lines)
    assert (found is None) == (wanted is None)
    assert found is None or found == pytest.approx(wanted)


def test_steps_that_fit_no_window_are_refused():
    twice = [row(0, 1, NOW), row(0, 1, NOW + S)]
    apart = [row(0, 1, NOW), row(1, 10**9, NOW)]
    for rows in (twice, apart, [row(0, 1, NOW, complete=False)], []):
        assert RankWindow.of(frame(rows)) is None
    window = RankWindow.of(frame([row(0, 5, NOW), row(1, 5, NOW)]))
    for one in (row(0, 5, NOW + S), row(2, 6, NOW), row(0, 4, NOW), row(0, 10**6, NOW)):
        assert not RankWindow.of(frame([row(0, 5, NOW), row(1, 5, NOW)])).add(frame([one]))
    assert window.add(frame([row(0, 5, NOW), row(1, 6, NOW + S)]))
