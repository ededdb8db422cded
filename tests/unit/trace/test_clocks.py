"""Clock offsets from the ends of collectives."""

import numpy as np
import polars as pl
import pytest
from tests.labs.generated_run import MS, START_NS, Schedule, generate, with_clocks

from kansoku.trace.clocks import estimate_clocks
from kansoku.trace.collectives import arrivals, collective_rows


def injected(ranks, seed):
    rng = np.random.default_rng(seed)
    offset = {r: float(rng.uniform(-50e6, 50e6)) for r in range(ranks)}
    drift = {r: float(rng.uniform(-20, 20)) for r in range(ranks)}
    offset[0] = drift[0] = 0.0
    return offset, drift


def jittered(spans, seed, scale_ns=300_000.0):
    """Let every rank notice the end of a collective late, as on a busy machine (one-sided)."""
    rng = np.random.default_rng(seed)
    late = rng.exponential(scale_ns, len(spans)).astype(np.int64)
    is_collective = pl.col("kind") == "collective"
    return spans.with_columns(
        duration_ns=pl.col("duration_ns")
        + pl.when(is_collective).then(pl.Series(late)).otherwise(0)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ranks", "tp"), [(4, 1), (8, 2), (16, 4)])
def test_offsets_of_50_ms_and_drifts_of_20_ppm_come_back_within_100_us(seed, ranks, tp):
    facts, spans, _ = generate(
        Schedule(
            ranks=ranks, tensor_parallel=tp, steps=300, forward_collectives=3, seed=seed, jitter=0.2
        )
    )
    offset, drift = injected(ranks, seed)
    observed = with_clocks(jittered(spans, seed), offset, drift)
    model = estimate_clocks(arrivals(collective_rows(observed, facts)))
    assert model.applied
    length = int(spans["start_ns"].max()) - START_NS
    for rank in range(ranks):
        for part in (0.05, 0.5, 1.0):
            true = offset[rank] + drift[rank] * 1e-6 * part * length
            shown = round(START_NS + part * length + true)
            assert abs(model.at(rank, shown) - true) < 100_000, (rank, part)


def test_the_order_of_arrival_is_right_after_correction():
    facts, spans, _ = generate(Schedule(ranks=4, steps=100, jitter=0.3, transfer_ns=400_000))
    offset, drift = injected(4, 7)
    rows = collective_rows(with_clocks(jittered(spans, 1, 100_000.0), offset, drift), facts)
    truth = arrivals(collective_rows(spans, facts))
    model = estimate_clocks(arrivals(rows))
    corrected = arrivals(rows, model)
    keys = ["group", "sequence", "rank"]
    joined = truth.join(corrected, on=keys, suffix="_c").with_columns(
        gap=pl.col("wait_ns"), wrong=(pl.col("wait_ns") - pl.col("wait_ns_c")).abs()
    )
    assert len(joined) == 4 * 400
    # Uncorrected, waits are wrong by tens of milliseconds.
    raw = truth.join(arrivals(rows), on=keys, suffix="_c")
    assert (raw["wait_ns"] - raw["wait_ns_c"]).abs().median() > 1e6
    assert joined["wrong"].max() < 200_000
    last_true = truth.filter(pl.col("wait_ns") == 0).select("group", "sequence", "rank")
    last_seen = corrected.filter(pl.col("wait_ns") == 0).select("group", "sequence", "rank")
    both = last_true.join(last_seen, on=["group", "sequence"], suffix="_c")
    clear = (
        truth.sort("wait_ns").group_by("group", "sequence").agg(second=pl.col("wait_ns").get(1))
    ).filter(pl.col("second") > 200_000)
    both = both.join(clear, on=["group", "sequence"])
    assert (both["rank"] == both["rank_c"]).all()
    assert len(both) > 100


def test_one_host_needs_no_correction_and_many_share_one_estimate_each():
    facts, spans, _ = generate(Schedule(ranks=16, steps=60))
    matched = arrivals(collective_rows(jittered(spans, 3, 50_000.0), facts))
    one = estimate_clocks(matched, nodes=dict.fromkeys(range(16), "a"))
    assert not one.applied
    offset = {r: 8e6 if r >= 8 else 0.0 for r in range(16)}
    nodes = {r: "b" if r >= 8 else "a" for r in range(16)}
    matched = arrivals(
        collective_rows(with_clocks(jittered(spans, 3, 50_000.0), offset, {}), facts)
    )
    two = estimate_clocks(matched, nodes=nodes)
    assert two.applied
    found = {o.rank: o.offset_ns for o in two.offsets}
    assert len({round(found[r]) for r in range(8, 16)}) == 1
    assert abs(found[8] - 8e6) < 50_000


def shared(ends, *, step_ns=20 * MS):
    """Return matched rows: ``ends[rank][n]`` is how late a rank leaves all-reduce ``n``."""
    rows = [
        (rank, "0", n, START_NS + n * step_ns + late)
        for rank, lates in ends.items()
        for n, late in enumerate(lates)
    ]
    return pl.DataFrame(
        rows,
        schema={"rank": pl.Int32, "group": pl.String, "sequence": pl.Int64, "end_ns": pl.Int64},
        orient="row",
    ).with_columns(seen=pl.len().over("group", "sequence").cast(pl.Int32))


def test_ranks_of_one_host_are_never_corrected_against_each_other():
    # Rank 1 leaves every all-reduce later, and later each time: 10 ms and 600 us more a step of
    # 20 ms, which as a clock would be 30,000 ppm. It is a busy machine.
    late = {0: [0] * 20, 1: [10 * MS + 600_000 * n for n in range(20)]}
    model = estimate_clocks(shared(late), nodes={0: "a", 1: "a"})
    assert not model.applied
    assert model.reason == "one host, one clock: nothing to correct"
    assert {(o.offset_ns, o.drift_ppm) for o in model.offsets} == {(0.0, 0.0)}
    assert model.spread_ns == 10 * MS + 600_000 * 9.5  # the middle of the twenty


def test_one_barrier_is_no_estimate_between_two_hosts():
    late = {0: [0] * 7, 1: [14 * MS] * 7}
    model = estimate_clocks(shared(late), nodes={0: "a", 1: "b"})
    assert (model.applied, model.unmatched) == (False, (1,))
    assert "8 collectives" in model.reason
    more = estimate_clocks(shared({0: [0] * 8, 1: [14 * MS] * 8}), nodes={0: "a", 1: "b"})
    assert more.applied
    assert more.at(1, START_NS) == 14 * MS


def test_a_drift_that_no_clock_has_is_noise_and_said():
    # 600 us a step of 20 ms is 30,000 ppm; the offset is still the middle of what was seen.
    late = {0: [0] * 21, 1: [5 * MS + 600_000 * n for n in range(21)]}
    model = estimate_clocks(shared(late), nodes={0: "a", 1: "b"})
    assert [o.drift_ppm for o in model.offsets] == [0.0, 0.0]
    assert model.at(1, START_NS) == 5 * MS + 600_000 * 10
    (note,) = (note for note in model.notes if "drift" in note)
    # 600 us in 20 ms of the other's clock.
    assert "b seem to drift by +30,000 ppm" in note


@pytest.mark.parametrize("drifts", [(20,), (20, -60, 60)])
def test_drifts_of_a_week_are_those_of_each_hosts_own_clock(drifts):
    """A drift in the reference's time, applied in the host's own, is off by its square: 0.24 ms.

    Without noise, an hour a collective: 1 ppm gains 3,600,000 ns in each.
    """
    hours, first = 168, 5 * MS
    late = {0: [0] * (hours + 1)}
    for rank, ppm in enumerate(drifts, 1):
        late[rank] = [first + 3_600_000 * ppm * n for n in range(hours + 1)]
    hour = 3600 * 1000 * MS
    model = estimate_clocks(shared(late, step_ns=hour))
    for rank in late:
        for n in (0, 84, hours):
            shown = START_NS + n * hour + late[rank][n]
            assert abs(model.at(rank, shown) - late[rank][n]) < 100, (rank, n)


def test_a_reference_that_is_ahead_of_all_others_is_corrected():
    late = {0: [5 * MS] * 20, 1: [0] * 20, 2: [0] * 20}
    model = estimate_clocks(shared(late), nodes={0: "a", 1: "b", 2: "c"})
    assert model.applied
    assert [o.offset_ns for o in model.offsets] == [0, -5 * MS, -5 * MS]


def test_differences_within_their_own_uncertainty_are_not_corrected():
    rng = np.random.default_rng(4)
    late = {rank: rng.normal(0, 3 * MS, 50).round().astype(int).tolist() for rank in range(2)}
    model = estimate_clocks(shared(late), nodes={0: "a", 1: "b"})
    assert not model.applied
    assert "agree" in model.reason


def test_a_slow_rank_of_a_host_does_not_move_the_clock_of_its_host():
    # Three ranks a host; one of them leaves everything 30 ms late. Host b is 2 ms ahead.
    late = {0: [0] * 20, 1: [0] * 20, 2: [0] * 20}
    late |= {3: [2 * MS] * 20, 4: [2 * MS] * 20, 5: [32 * MS] * 20}
    nodes = {rank: "a" if rank < 3 else "b" for rank in range(6)}
    model = estimate_clocks(shared(late), nodes=nodes)
    assert [o.offset_ns for o in model.offsets] == [0, 0, 0, 2 * MS, 2 * MS, 2 * MS]


def busy(seed, *, collectives, late_part=0.6, slice_ns=2_500_000):
    """Return matched rows of four ranks on a busy machine, 40 ms a collective.

    Everybody is there after up to 10 ms, the transfer takes 1.5 ms. Most ends are then late by whole
    time slices of the scheduler (and some of it), the others by 0.05 ms on average.
    """
    rng = np.random.default_rng(seed)
    begin = START_NS + 40 * MS * np.arange(collectives)[:, None]
    start = begin + rng.uniform(0, 10 * MS, (collectives, 4))
    slices = (rng.random((collectives, 4)) < late_part) * rng.geometric(0.5, (collectives, 4))
    late = slices * slice_ns * rng.uniform(0.9, 1.1, slices.shape)
    late += rng.exponential(50_000, slices.shape)
    end = start.max(axis=1, keepdims=True) + 1_500_000 + late
    return pl.DataFrame(
        {
            "rank": np.tile(np.arange(4, dtype=np.int32), collectives),
            "group": ["0"] * (4 * collectives),
            "sequence": np.repeat(np.arange(collectives), 4),
            "op": ["all_reduce"] * (4 * collectives),
            "bytes": [1 << 20] * (4 * collectives),
            "arrival_ns": start.ravel().astype(np.int64),
            "end_ns": end.ravel().astype(np.int64),
            "seen": np.full(4 * collectives, 4, dtype=np.int32),
        }
    )


def on_clocks(rows, offset, drift):
    ranks = list(offset)
    table = pl.DataFrame(
        {"rank": ranks, "o": list(offset.values()), "d": [drift[r] * 1e-6 for r in ranks]},
        schema_overrides={"rank": pl.Int32},
    )
    return rows.join(table, on="rank", maintain_order="left").with_columns(
        pl.col(name)
        + (pl.col("o") + pl.col("d") * (pl.col(name) - START_NS)).round().cast(pl.Int64)
        for name in ("arrival_ns", "end_ns")
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_hundred_collectives_of_a_busy_machine_are_enough(seed):
    offset, drift = injected(4, seed)
    model = estimate_clocks(on_clocks(busy(seed, collectives=100), offset, drift))
    for found in model.offsets[1:]:
        for part in (0, 0.5, 1):
            since = part * 100 * 40 * MS
            true = offset[found.rank] + drift[found.rank] * 1e-6 * since
            error = abs(model.at(found.rank, round(START_NS + since + true)) - true)
            assert error < 100_000, (found.rank, part)
            assert error < 2 * found.uncertainty_ns
        assert found.uncertainty_ns < 200_000


def test_an_end_that_is_mostly_a_time_slice_late_is_kept_within_the_bounds():
    # Host b leaves three of four collectives 3 ms late to 0.1 ms, so most ends lie 3 ms apart. But
    # where b left in time, 0.5 ms after the last start, that was on a: b cannot be 3 ms ahead.
    rng = np.random.default_rng(5)
    n = 80
    begin = START_NS + 40 * MS * np.arange(n)
    slow = np.arange(n) % 4 != 0
    start = np.stack([begin + 5 * MS, begin])  # a comes last
    end = begin + 5 * MS + 500_000 + rng.integers(0, 100_000, (2, n))
    end[1, slow] += 3 * MS
    rows = pl.DataFrame(
        {
            "rank": np.repeat(np.array([0, 1], dtype=np.int32), n),
            "group": ["0"] * (2 * n),
            "sequence": np.tile(np.arange(n), 2),
            "arrival_ns": start.ravel(),
            "end_ns": end.ravel(),
            "seen": np.full(2 * n, 2, dtype=np.int32),
        }
    )
    model = estimate_clocks(rows, nodes={0: "a", 1: "b"})
    assert abs(model.at(1, START_NS)) < 100_000


def test_an_operation_that_ends_before_all_have_started_is_not_used_and_said():
    # As if the reduce-scatters handed their work on: rank 1 ends 30 ms before rank 0 starts.
    rows = on_clocks(busy(3, collectives=60), dict.fromkeys(range(4), 0.0) | {2: 5e6}, [0.0] * 4)
    early = pl.col("rank") == 1
    wrong = rows.with_columns(
        op=pl.lit("reduce_scatter"),
        group=pl.lit("1"),
        arrival_ns=pl.col("arrival_ns") - pl.when(early).then(50 * MS).otherwise(0),
        end_ns=pl.col("end_ns") - pl.when(early).then(50 * MS).otherwise(0),
    )
    wrong = wrong.with_columns(
        pl.when(early & (pl.col("sequence") % 2 == 0))
        .then(pl.col(name) + 100 * MS)
        .otherwise(pl.col(name))
        .alias(name)
        for name in ("arrival_ns", "end_ns")
    )
    model = estimate_clocks(pl.concat([rows, wrong]))
    (note,) = (note for note in model.notes if "reduce_scatter" in note)
    assert note.startswith("reduce_scatter: ended on one host before another had started")
    assert abs(model.at(1, START_NS)) < 100_000
    assert abs(model.at(2, START_NS) - 5e6) < 100_000


def ends_of(late, *, every_ns=40 * MS, op="all_reduce", first=0):
    """Return matched rows of hosts that leave ``late[host][n]`` ns after the end of operation n."""
    late = {host: np.asarray(values) for host, values in late.items()}
    count = len(next(iter(late.values())))
    number = first + np.arange(count)
    parts = [
        pl.DataFrame(
            {
                "rank": np.full(count, host, dtype=np.int32),
                "group": [op] * count,
                "sequence": number,
                "op": [op] * count,
                "bytes": [1 << 20] * count,
                "arrival_ns": START_NS + every_ns * number - 20 * MS,
                "end_ns": START_NS + every_ns * number + values.round().astype(np.int64),
                "seen": np.full(count, len(late), dtype=np.int32),
            }
        )
        for host, values in late.items()
    ]
    return pl.concat(parts)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("alone", [(0,), (2,), (1, 3)])
def test_the_clock_of_hosts_that_leave_early_every_second_time_is_not_claimed(alone, seed):
    """They, the reference too, leave with the others or 1.7 ms before: nothing says which is right."""
    rng = np.random.default_rng(seed)
    late = {host: rng.exponential(40_000, 30) + 3 * MS for host in range(4)}
    for host in alone:
        late[host][::2] -= 1.7 * MS
    model = estimate_clocks(ends_of(late))
    for found in model.offsets[1:]:
        error = abs(model.at(found.rank, START_NS + 600 * MS))
        assert error <= found.uncertainty_ns


@pytest.mark.parametrize("seed", range(6))
def test_what_joins_a_host_loosely_makes_its_clock_less_known(seed):
    """Host 1 by sharp ends; host 2 by twenty blurred ones, and always some 60 us after host 1."""
    rng = np.random.default_rng(seed)
    sharp = ends_of({host: rng.normal(0, 15_000, 200) for host in (0, 1)}, every_ns=4 * MS)
    blurred = ends_of(
        {1: rng.normal(0, 120_000, 20), 2: rng.normal(60_000, 120_000, 20)}, op="all_gather"
    )
    model = estimate_clocks(pl.concat([sharp, blurred]))
    (_, near, far) = model.offsets
    assert near.uncertainty_ns < 60_000 < far.uncertainty_ns
    for found in (near, far):
        for part in (0, 400, 800):
            assert abs(model.at(found.rank, START_NS + part * MS)) <= found.uncertainty_ns


@pytest.mark.parametrize("collectives", [15, 30, 60])
def test_the_interval_of_few_collectives_holds_95_of_100_runs(collectives):
    """Two hosts leave 0.3 ms late on average; clocks are up to 50 ms and 20 ppm apart."""
    runs, length, held = 200, 10_000 * MS, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        offset, drift = injected(2, seed)
        late = {host: rng.exponential(300_000, collectives) for host in (0, 1)}
        rows = ends_of(late, every_ns=length // (collectives - 1))
        found = estimate_clocks(on_clocks(rows, offset, drift))
        errors = []
        for since in (0, length):
            true = offset[1] + drift[1] * 1e-6 * since
            errors.append(abs(found.at(1, round(START_NS + since + true)) - true))
        held += max(errors) <= found.offsets[1].uncertainty_ns
    assert held >= 0.95 * runs


def test_an_interval_is_as_wide_as_the_fewest_collectives_between_make_it():
    """Host 3 shares 400 with host 2, but only ten join both to the others.

    Ends differ by 71 us, in the mean of ten by 22: 49 us in 95 % if many, three times for so few.
    """
    rng = np.random.default_rng(1)
    near = ends_of({host: rng.normal(0, 50_000, 400) for host in (0, 1)}, every_ns=MS)
    few = ends_of({host: rng.normal(0, 50_000, 10) for host in (1, 2)}, op="all_gather")
    far = ends_of({host: rng.normal(0, 50_000, 400) for host in (2, 3)}, op="barrier", every_ns=MS)
    _, one, two, three = (
        found.uncertainty_ns for found in estimate_clocks(pl.concat([near, few, far])).offsets
    )
    assert one < 60_000
    assert two > 120_000
    assert three > 120_000


def test_nothing_matched_is_said():
    facts, spans, _ = generate(Schedule(ranks=1, steps=5, backward_collectives=0))
    model = estimate_clocks(arrivals(collective_rows(spans, facts)))
    assert not model.applied
    assert "no collective" in model.reason
