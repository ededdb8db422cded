"""Numbers of nodes against their peers and their own past.

One series is one metric of one device, node, rank or target. Series of one metric are laid on a
common grid of bins; a series speaks where it differs from the median of its peers by more than the
quantity's ratio and least difference, and lastingly so. Where all series of a wide quantity
(storage, network, temperature) changed together, the change itself is what is said.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.catalog.quantities import Quantity, quantity_of, words_of
from kansoku.catalog.xid import codes
from kansoku.diagnose.names import device_domain
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.recognise import by_code
from kansoku.model import Domain
from kansoku.stats.change import change_point

__all__ = [
    "MEASURE_COLUMNS",
    "MeasurePolicy",
    "against_plan",
    "dated",
    "read_measures",
    "slower_than_planned",
    "taken_on_the_node",
]

Floats = npt.NDArray[np.float64]

MEASURE_COLUMNS: dict[str, pl.DataType] = {
    "metric": pl.String(),
    "node": pl.String(),
    "device": pl.String(),
    "target": pl.String(),
    "rank": pl.Int64(),
    "time_ns": pl.Int64(),  # null in a snapshot
    "value": pl.Float64(),
}
# Smaller "times" are step numbers.
_LEAST_DATE_NS = 10**17
_COUNTS_OFTEN = 0.2
_LIFETIME = re.compile(r"\b(?:agg|aggregate|lifetime)\b")
_ENTITY = ["node", "device", "target", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePolicy:
    """Thresholds of the comparison; what counts as far stands with each quantity."""

    bins: int = 120
    few_bins: int = 8
    """With fewer, the last third decides."""
    lasting_bins: int = 4
    """Bins in a row that must stand out."""
    lasting_share: float = 0.3
    """Or this share of all bins."""
    most_outliers: float = 0.34
    """Share of the series that may stand out and still be called outliers."""
    spread: float = 6.0
    """Distance from the peers in their own spreads."""
    change_score: float = 6.0
    slower_than_planned: float = 1.3
    """Observed over planned step time; plans of known machines are within 15 %."""
    slower_than_possible: float = 2.0
    """The same where the plan was made from what the run shows: the best that it could do."""
    most_series: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """One metric's series on common bins: ``values`` is (series, bins), NaN where none."""

    metric: str
    entities: tuple[tuple[str | None, str | None, str | None, int | None], ...]
    values: Floats
    times_ns: npt.NDArray[np.int64] | None

    def time_ns(self, index: int) -> int | None:
        return None if self.times_ns is None else int(self.times_ns[index])


def _grid(frame: pl.DataFrame, metric: str, policy: MeasurePolicy) -> _Grid:
    times = frame["time_ns"]
    series = frame.select(_ENTITY).unique(maintain_order=True).head(policy.most_series)
    series = series.with_row_index("series")
    first, last = times.min(), times.max()
    keyed = frame.join(series, on=_ENTITY, how="inner", nulls_equal=True)
    if isinstance(first, int) and isinstance(last, int) and last > first:
        counts = frame.select(pl.struct("time_ns").n_unique()).item()
        bins = max(1, min(policy.bins, counts))
        width = (last - first) // bins + 1
        keyed = keyed.with_columns(((pl.col("time_ns") - first) // width).alias("bin"))
        stamps = first + np.arange(bins, dtype=np.int64) * width
    else:
        bins, stamps = 1, None
        keyed = keyed.with_columns(pl.lit(0).alias("bin"))
        if isinstance(first, int):
            stamps = np.array([first], dtype=np.int64)
    cells = keyed.group_by("series", "bin").agg(pl.col("value").mean()).drop_nulls("bin")
    values = np.full((len(series), bins), np.nan)
    values[cells["series"].to_numpy(), cells["bin"].to_numpy().astype(np.int64)] = cells["value"]
    return _Grid(
        metric=metric,
        entities=tuple(series.select(_ENTITY).iter_rows()),
        values=values,
        times_ns=stamps,
    )


def _median(values: Floats) -> Floats:
    """Return the median of each bin, NaN where no series has a value."""
    empty = np.isnan(values).all(axis=0)
    filled = np.where(empty, 0.0, values)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=0))


def _growth(values: Floats) -> Floats:
    """Return what a counter grew by in each bin; resets count as restarts from zero."""
    filled = _carried(values)
    step = np.diff(filled, axis=1, prepend=filled[:, :1])
    return np.where(step < 0, np.maximum(filled, 0), step)


def _carried(values: Floats) -> Floats:
    """Fill holes with the last value before them."""
    out = values.copy()
    for column in range(1, out.shape[1]):
        holes = np.isnan(out[:, column])
        out[holes, column] = out[holes, column - 1]
    return out


def _never_falls(values: Floats) -> bool:
    """Say whether no series falls, but for a reset now and then."""
    if values.shape[1] < 3:
        return False
    steps = np.diff(_carried(values), axis=1)
    known = steps[~np.isnan(steps)]
    return bool(len(known)) and float((known < 0).mean()) < 0.01


def _is_counter(values: Floats) -> bool:
    """Say whether all series only ever grow, and some do so often: a level rises once."""
    if not _never_falls(values):
        return False
    grows = np.diff(_carried(values), axis=1) > 0
    return bool((grows.mean(axis=1) >= _COUNTS_OFTEN).any())


def _lasting(
    bad: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_], policy: MeasurePolicy
) -> int:
    """Return the first bin of the lasting stretch, or -1."""
    count = len(bad)
    if count < policy.few_bins:
        last = slice(max(0, count - max(1, count // 3)), count)
        if bad[last].all() and known[last].any():
            index = count - 1
            while index > 0 and bad[index - 1]:
                index -= 1
            return index
        return -1
    best, start, run = 0, -1, 0
    for index, flag in enumerate(bad):
        # A hole in the samples does not end a stretch.
        run = run + 1 if flag else (run if not known[index] else 0)
        if run > best:
            best, start = run, index - run + 1
    share = bad.sum() / max(known.sum(), 1)
    if best >= policy.lasting_bins or (share >= policy.lasting_share and best >= 2):
        return start
    return -1


def _sides(quantity: Quantity) -> int:
    return -1 if quantity.test == "low" else 1


def _outliers(
    grid: _Grid, quantity: Quantity, policy: MeasurePolicy
) -> list[tuple[int, int, float, float]]:
    """Return ``(series, bin, value, peers)`` of series that lastingly differ from their peers."""
    values = grid.values
    series, bins = values.shape
    if series < 3:
        return []
    with np.errstate(invalid="ignore", all="ignore"):
        median = _median(values)
        distance = _sides(quantity) * (values - median)
        spread = 1.4826 * _median(np.abs(values - median))
        if quantity.test == "low":
            far = values <= median * quantity.ratio
        else:
            far = values >= np.maximum(median, 0) * quantity.ratio
        bad = far & (distance >= max(quantity.least, 1e-12)) & (distance > policy.spread * spread)
    if bins == 1 and quantity.test == "high" and quantity.role == "symptom" and series < 4:
        return []
    known = ~np.isnan(values)
    found = []
    for index in range(series):
        start = _lasting(bad[index], known[index], policy)
        if start >= 0:
            chosen = bad[index]
            found.append(
                (
                    index,
                    start,
                    float(np.nanmedian(values[index][chosen])),
                    float(np.nanmedian(median[chosen])),
                )
            )
    return found if len(found) <= max(1, policy.most_outliers * series) else []


def _own_change(
    grid: _Grid, quantity: Quantity, policy: MeasurePolicy
) -> tuple[int, float, float] | None:
    """Return ``(bin, before, after)`` where the series together changed for the worse."""
    middle = _median(grid.values)
    known = ~np.isnan(middle)
    if known.sum() < 12:
        return None
    change = change_point(middle[known], margin=4)
    if change is None or change.score < policy.change_score:
        return None
    worse = _sides(quantity) * (change.after - change.before)
    ratio = quantity.ratio
    far = (
        change.after <= change.before * ratio
        if quantity.test == "low"
        else change.after >= change.before * ratio
    )
    if not far or worse < quantity.least:
        return None
    return int(np.flatnonzero(known)[change.index]), change.before, change.after


def _number(value: float) -> str:
    return f"{value:.4g}"


def _shared(
    entities: Sequence[tuple[str | None, str | None, str | None, int | None]],
) -> tuple[None, None, str | None, None]:
    """Return what all series have in common: the one target that all clients complain of."""
    targets = {entity[2] for entity in entities}
    return None, None, targets.pop() if len(targets) == 1 else None, None


def _say(
    grid: _Grid, quantity: Quantity, series: int | None, start: int, sentence: str, scale: float = 1
) -> Observation:
    node, device, target, rank = _shared(grid.entities) if series is None else grid.entities[series]
    where = ", ".join(
        f"{key} {value}"
        for key, value in zip(_ENTITY, (node, device, target, rank), strict=True)
        if value is not None
    )
    domain = quantity.domain or Domain.HOST
    if quantity.component == "pcie" and quantity.test == "low":
        domain = device_domain(device, grid.metric) or domain
    return Observation(
        rule=f"metric:{quantity.name}",
        text=sentence,
        source=f"{grid.metric}{{{where}}}" if where else grid.metric,
        kind="metric",
        domain=domain,
        component=quantity.component,
        role=quantity.role,
        strength=min(1.0, quantity.strength * scale),
        meaning="",
        action="",
        time_ns=grid.time_ns(start),
        last_ns=grid.time_ns(grid.values.shape[1] - 1),
        node=node,
        device=device,
        target=target,
        rank=rank,
    )


def _by_pair(grid: _Grid, quantity: Quantity, policy: MeasurePolicy) -> list[Observation]:
    """Return the one of two series that changed for the worse, or what both did."""
    found = []
    for series in range(2):
        alone = replace(grid, values=grid.values[series : series + 1])
        change = _own_change(alone, quantity, policy)
        if change is not None:
            bin_, before, after = change
            text = f"{quantity.name} went from {_number(before)} to {_number(after)}"
            found.append(_say(grid, quantity, series, bin_, text, 0.8))
    return found


_MOST_UNEVEN = 1.5


def _uneven(grid: _Grid, quantity: Quantity) -> tuple[int, str] | None:
    """Return since when, and the sentence, where the largest wanders far above the median."""
    if len(grid.entities) < 4 or grid.values.shape[1] < 8 or quantity.test != "high":
        return None
    with np.errstate(all="ignore"):
        ratio = np.nanmax(np.nan_to_num(grid.values), axis=0) / _median(grid.values)
    usual = float(np.nanmedian(ratio))
    who = np.nanargmax(np.nan_to_num(grid.values), axis=0)
    if not usual >= _MOST_UNEVEN or len(np.unique(who)) < 4:
        return None
    start = int(np.flatnonzero(ratio >= _MOST_UNEVEN)[0])
    return start, f"{quantity.name} is uneven: the largest is {usual:.1f} times the median"


def _by_peers(grid: _Grid, quantity: Quantity, policy: MeasurePolicy) -> list[Observation]:
    found = [
        _say(
            grid, quantity, series, start,
            f"{quantity.name} is {_number(value)} where the peers have {_number(peers)}",
        )
        for series, start, value, peers in _outliers(grid, quantity, policy)
    ]  # fmt: skip
    if found or not (
        quantity.wide or len(grid.entities) < 3 or quantity.domain is Domain.APPLICATION
    ):
        return found
    if quantity.domain is Domain.APPLICATION and (uneven := _uneven(grid, quantity)) is not None:
        return [_say(grid, quantity, None, *uneven)]
    if len(grid.entities) == 2:
        return _by_pair(grid, quantity, policy)
    change = _own_change(grid, quantity, policy)
    if change is None:
        return []
    bin_, before, after = change
    alone = 0 if len(grid.entities) == 1 else None
    everyone = "" if alone == 0 else " on all together"
    return [
        _say(
            grid, quantity, alone, bin_,
            f"{quantity.name} went from {_number(before)} to {_number(after)}{everyone}",
            0.8,
        )
    ]  # fmt: skip


def _by_growth(grid: _Grid, quantity: Quantity, policy: MeasurePolicy) -> list[Observation]:
    """Counters of bad events: those that grow where (nearly) no peer does."""
    if grid.values.shape[1] == 1:
        growth = np.nan_to_num(grid.values)
    elif _never_falls(grid.values):
        growth = _growth(grid.values)
    else:
        growth = np.nan_to_num(np.maximum(grid.values, 0))
    growth = np.nan_to_num(growth)
    totals = growth.sum(axis=1)
    usual = float(np.median(totals)) if len(totals) > 2 else 0.0
    bad = np.flatnonzero((totals >= max(quantity.least, 1e-12)) & (totals > 4 * usual))
    if len(bad) > max(2, policy.most_outliers * len(totals)):
        if not quantity.wide or grid.values.shape[1] < 12:
            return []
        bad = bad[:0]
    if not len(bad):
        rates = _Grid(
            metric=grid.metric, entities=grid.entities, values=growth, times_ns=grid.times_ns
        )
        change = _own_change(rates, quantity, policy) if quantity.wide else None
        if change is None:
            return []
        return [
            _say(
                rates, quantity, None, change[0],
                f"{quantity.name} grow on all together since then", 0.8,
            )
        ]  # fmt: skip
    found = []
    single = grid.values.shape[1] == 1 and len(totals) < 3
    for series in bad:
        start = int(np.flatnonzero(growth[series] > 0)[0])
        peers = float(np.median(np.delete(totals, series))) if len(totals) > 1 else 0.0
        sentence = f"{quantity.name} grew by {_number(totals[series])}"
        if len(totals) > 1:
            sentence += f", {_number(peers)} on the peers"
        # A lone total says how much since boot, not since when.
        found.append(_say(grid, quantity, int(series), start, sentence, 0.5 if single else 1))
    return found


def _by_level(grid: _Grid, quantity: Quantity) -> list[Observation]:
    """Values that need no peers: set where zero is due, space gone, a target down."""
    found = []
    for series, row in enumerate(grid.values):
        known = row[~np.isnan(row)]
        if not len(known):
            continue
        if quantity.test == "set":
            bad = np.flatnonzero(np.nan_to_num(row) > 0)
            # Something that never changes was there before the job.
            old = len(known) > 3 and bool((known == known[0]).all())
            # So was what was counted over a device's life, where one look does not say when.
            old = old or (len(known) == 1 and bool(_LIFETIME.search(words_of(grid.metric))))
            scale = 0.45 if old else 1.0
        elif quantity.test == "empty":
            bad = np.flatnonzero(np.nan_to_num(row, nan=1.0) <= 0)
            scale = 1.0
        elif quantity.test == "full":
            full = 0.995 if known.max() <= 1.0 else 99.5
            bad = np.flatnonzero(np.nan_to_num(row) >= full)
            bad = bad if known.max() <= 100.0 else bad[:0]
            scale = 1.0
        else:
            bad = np.flatnonzero(np.nan_to_num(row, nan=1.0) <= 0)
            bad = bad if len(known) and known[-1] <= 0 and known[0] > 0 else bad[:0]
            scale = 1.0
        if not len(bad):
            continue
        start = int(bad[0])
        sentence = f"{quantity.name}: {_number(float(row[bad[-1]]))}"
        one = _say(grid, quantity, series, start, sentence, scale)
        code = codes().get(("xid", int(row[bad[-1]]))) if quantity.name == "Xid" else None
        found.append(one if code is None else by_code(one, code))
    return found


def _numerics(grid: _Grid, quantity: Quantity) -> list[Observation]:
    """Loss and gradient norm: no number, or far above its recent past."""
    found = []
    for series, row in enumerate(grid.values):
        finite = row[np.isfinite(row)]
        if len(finite) < 12:
            continue
        for index in range(12, len(row)):
            past = row[max(0, index - 20) : index]
            past = past[np.isfinite(past)]
            if len(past) < 8 or not np.isfinite(row[index]):
                continue
            middle = float(np.median(past))
            spread = 1.4826 * float(np.median(np.abs(past - middle)))
            if row[index] > 2.0 * abs(middle) and row[index] - middle > 12 * max(spread, 1e-9):
                sentence = f"{quantity.name} jumped from {_number(middle)} to {_number(row[index])}"
                found.append(_say(grid, quantity, series, index, sentence))
                break
    return found


def _diverges(grid: _Grid, quantity: Quantity) -> list[Observation]:
    """Loss that climbs away from the best it had been, and stays there."""
    found = []
    for series, row in enumerate(grid.values):
        known = np.flatnonzero(np.isfinite(row))
        if len(known) < 24:
            continue
        middles = [float(np.median(row[part])) for part in np.array_split(known, 8)]
        best = int(np.argmin(middles))
        late = middles[best + 1 :]
        climbs = len(late) >= 2 and all(b >= a for a, b in pairwise(middles[best:]))
        if climbs and middles[best] > 0 and late[-1] >= 1.5 * middles[best]:
            start = int(np.array_split(known, 8)[best][-1])
            text = f"{quantity.name} climbed from {_number(middles[best])} to {_number(late[-1])}"
            found.append(_say(grid, quantity, series, start, text, 1.5))
    return found


_OF_THE_NODE = re.compile(r"\b(?:cpu|gpu|sm|load\d*|mem\w*|util\w*)\b")
# A management controller tells these of a node that is down, too.
_OF_CONTROLLERS = re.compile(
    r"\b(?:temp\w*|power|watts?|volt\w*|fan|psu|pdu|inlet|chassis|ipmi|bmc|redfish|up|state|status)\b"
)


def taken_on_the_node(metric: str) -> bool:
    """Say whether a metric of this name can only be read by a node that runs."""
    words = words_of(metric)
    return bool(_OF_THE_NODE.search(words)) and not _OF_CONTROLLERS.search(words)


def _silent(frame: pl.DataFrame) -> list[Observation]:
    """Nodes whose samples end well before the others' do."""
    stamped = frame.filter(pl.col("time_ns").is_not_null() & pl.col("node").is_not_null())
    if stamped.is_empty():
        return []
    ends = stamped.group_by("node").agg(
        pl.col("time_ns").max().alias("end"), pl.col("time_ns").n_unique().alias("samples")
    )
    if len(ends) < 3:
        return []
    begin, end = int(stamped["time_ns"].min()), int(ends["end"].max())  # type: ignore[arg-type]
    usual = float(ends["samples"].median() or 1)  # type: ignore[arg-type]
    gap = max(4 * (end - begin) / max(usual, 1), 0.08 * (end - begin))
    quiet = ends.filter(pl.col("end") < end - gap)
    if quiet.is_empty() or len(quiet) > 0.34 * len(ends):
        return []
    return [
        Observation(
            rule="silence.node",
            text=f"{node} sent no more numbers while its {len(ends) - 1} peers went on",
            source="metrics",
            kind="metric",
            domain=Domain.HOST,
            component="node lost",
            role="either",
            strength=0.6,
            meaning="a node that falls silent alone is down or cut off",
            action="look at its console and its kernel log",
            time_ns=last,
            last_ns=last,
            node=node,
        )
        for node, last, _ in quiet.iter_rows()
    ]


def read_measures(frame: pl.DataFrame, *, policy: MeasurePolicy | None = None) -> list[Observation]:
    """Return what the numbers of a table (:data:`MEASURE_COLUMNS`) say."""
    policy = policy or MeasurePolicy()
    found = _silent(frame)
    for (metric,), part in frame.group_by("metric", maintain_order=True):
        quantity = quantity_of(str(metric))
        if quantity is None or quantity.test == "none" or quantity.domain is None:
            continue
        nans = part.filter(~pl.col("value").is_finite())
        grid = _grid(part.with_columns(pl.col("value").fill_nan(None)), str(metric), policy)
        found += _judge(grid, quantity, policy, nans)
    return found


def against_plan(
    frame: pl.DataFrame, planned_s: float, *, policy: MeasurePolicy | None = None
) -> list[Observation]:
    """Return that the median step takes longer than a plan expects of it: since when is unknown."""
    policy = policy or MeasurePolicy()
    median = frame.filter(pl.col("metric") == "step time s")["value"].median()
    if not isinstance(median, float) or median < policy.slower_than_planned * planned_s:
        return []
    return [slower_than_planned(median, planned_s, "kansoku plan")]


def slower_than_planned(median_s: float, planned_s: float, source: str) -> Observation:
    """Return that steps take longer than a plan expects, since an unknown time."""
    return Observation(
        rule="metric:step time", text=f"steps take {median_s:.3g} s, the plan expects "
        f"{planned_s:.3g} s", source=source, kind="metric", domain=Domain.FRAMEWORK,
        component="step time", role="symptom", strength=0.25,
        meaning="slow from the begin: the layout, or the machine as a whole",
        action="lay the run beside the plan: kansoku plan explain --run",
    )  # fmt: skip


def dated(seen: Sequence[Observation], clock: Sequence[tuple[int, int]]) -> list[Observation]:
    """Give what is known by its step the time of that step; ``clock`` holds (step, Unix ns)."""
    steps = sorted(dict(clock).items())
    found = []
    for one in seen:
        if steps and one.time_ns is not None and 0 < one.time_ns < _LEAST_DATE_NS:
            index = max(0, bisect_right(steps, (one.time_ns, _LEAST_DATE_NS * 1000)) - 1)
            found.append(replace(one, time_ns=steps[index][1], last_ns=steps[-1][1]))
        else:
            found.append(one)
    return found


def _judge(
    grid: _Grid, quantity: Quantity, policy: MeasurePolicy, nans: pl.DataFrame
) -> Sequence[Observation]:
    if quantity.test == "numerics":
        found = _numerics(grid, quantity) or _diverges(grid, quantity)
        if not nans.is_empty():
            first = nans["time_ns"].min()
            found.append(
                Observation(
                    rule="app-nan-loss", text=f"{grid.metric} is no number", source=grid.metric,
                    kind="metric", domain=Domain.APPLICATION, component="numerics", role="either",
                    strength=0.7, meaning="training diverged, or computed wrong", action="",
                    time_ns=first if isinstance(first, int) else None,
                )
            )  # fmt: skip
        return found
    if quantity.test in {"set", "empty", "full", "down"}:
        return _by_level(grid, quantity)
    if quantity.test == "grows":
        return _by_growth(grid, quantity, policy)
    long = grid.values.shape[1] > 8
    if _is_counter(grid.values) and (quantity.rate or (quantity.test == "high" and long)):
        grid = _Grid(
            metric=grid.metric, entities=grid.entities, values=_growth(grid.values),
            times_ns=grid.times_ns,
        )  # fmt: skip
    return _by_peers(grid, quantity, policy)
