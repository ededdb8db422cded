"""Spans of the ranks become step rows whose phases sum to the step, to the nanosecond.

The main thread of a rank is cut at every span boundary, and each piece of time is booked once, on
the innermost span that covers it. So the phases of a step sum to its duration by construction and
none is negative, whatever the spans look like: a child is clipped to its parent, a span to the
steps it touches, and of two overlapping siblings the earlier one keeps the time.

Booking rules, from the outside in:

- a collective is exposed collective time wherever it stands;
- forward inside backward is recomputation (activation checkpointing): it belongs to backward;
- evaluation outside any phase goes to ``other``, with every forward and data wait inside it;
- garbage collection, compilation and unknown kinds belong to what surrounds them, and to
  ``other`` where nothing does;
- time covered by no span is ``other``.

A collective on another thread, or one issued without blocking, is no main-thread time: exposed is
the wait for it (kind ``collective_wait``). Where the recorder saw no waits, exposed is the part
that runs while the main thread can only wait: from the last issue inside a backward to its end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.model.phase import PHASES, Phase
from kansoku.model.ring import LANE_SHIFT
from kansoku.model.run import RunFacts
from kansoku.model.tables import PROCESS_SHIFT, table_schema

__all__ = ["cut_steps", "gc_rows", "merge_steps", "process_of", "queue_rows", "step_rows"]

Ints = npt.NDArray[np.int64]

_PHASE_INDEX = {phase.value: number for number, phase in enumerate(PHASES)}
_OTHER = _PHASE_INDEX[Phase.OTHER]
_BACKWARD = _PHASE_INDEX[Phase.BACKWARD]
_COLLECTIVE = _PHASE_INDEX[Phase.COLLECTIVE]
# Time of an evaluation: its own class while booking, so that its forwards do not count as
# training; it ends up in "other".
_EVALUATION = len(PHASES)
_CLASSES = len(PHASES) + 1
# Kind codes: the phases, then these.
_KINDS = {**_PHASE_INDEX, "collective_wait": _COLLECTIVE, "evaluation": _EVALUATION}
_SPANS_AT_ONCE = 600_000
# What is needed of a span; names, groups and dtypes of millions are not.
_COLUMNS = [
    "run",
    "rank",
    "step",
    "kind",
    "start_ns",
    "duration_ns",
    "id",
    "thread",
    "cpu_ns",
    "attributes",
]
_FROM_SAMPLES = (
    "energy_error_j",
    "nic_error_bytes",
    "nvlink_bytes",
    "sm_activity",
    "memory_activity",
)
"""Columns that no span says: joined from samples by time."""
_STEP_ROWS = pl.Schema({**table_schema("steps"), "run_delay_ns": pl.Int64()})
_QUEUE_ROWS = pl.Schema(
    {"rank": pl.Int32(), "step": pl.Int32(), "kind": pl.String(), "queue_ns": pl.Int64()}
)
_INHERITS = _CLASSES
_STEP = _CLASSES + 1


def _booking_rules() -> Ints:
    """Return ``(class of the parent, kind) -> class``."""
    rules = np.empty((_CLASSES, _CLASSES + 1), dtype=np.int64)
    for parent in range(_CLASSES):
        rules[parent, :] = np.arange(_CLASSES + 1)
        rules[parent, _INHERITS] = parent
        if parent != _OTHER:
            rules[parent, _EVALUATION] = parent
    rules[_EVALUATION, :] = _EVALUATION
    rules[_BACKWARD, _PHASE_INDEX[Phase.FORWARD]] = _BACKWARD
    rules[_COLLECTIVE, :] = _COLLECTIVE
    rules[:, _COLLECTIVE] = _COLLECTIVE
    rules[:, _PHASE_INDEX[Phase.CHECKPOINT]] = _PHASE_INDEX[Phase.CHECKPOINT]
    rules[_COLLECTIVE, _PHASE_INDEX[Phase.CHECKPOINT]] = _COLLECTIVE
    return rules


_RULES = _booking_rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Every rank's clock laid end to end on one axis, so that one sweep serves all ranks."""

    ranks: Ints
    low: Ints
    """Earliest time of each rank, ns."""
    base: Ints
    """Where each rank's earliest time lies on the axis."""

    def place(self, rank_index: Ints, time_ns: Ints) -> Ints:
        return np.asarray(time_ns - self.low[rank_index] + self.base[rank_index])


def _axis(rank: Ints, start: Ints, end: Ints) -> tuple[_Axis, Ints]:
    ranks = np.flatnonzero(np.bincount(rank))
    index = np.searchsorted(ranks, rank)
    low = np.full(len(ranks), np.iinfo(np.int64).max)
    high = np.full(len(ranks), np.iinfo(np.int64).min)
    np.minimum.at(low, index, start)
    np.maximum.at(high, index, end)
    # One nanosecond between ranks keeps the last span of one from touching the first of the next.
    base = np.concatenate([[0], np.cumsum(high - low + 1)[:-1]])
    return _Axis(ranks=ranks, low=low, base=base), index.astype(np.int64)


def _kind_codes(kind: pl.Series) -> Ints:
    codes = _KINDS
    return (
        kind.cast(pl.String)
        .replace_strict(list(codes), list(codes.values()), default=_INHERITS, return_dtype=pl.Int64)
        .to_numpy()
    )


def _last_record(spans: pl.DataFrame) -> dict[int, int]:
    """Return process to the time of the last thing it recorded; only those with open spans matter.

    A rank that was started again is a process each time.
    """
    torn = spans.filter(pl.col("duration_ns").is_null() & pl.col("rank").is_not_null())
    if torn.is_empty():
        return {}
    last = (
        spans.filter(pl.col("process").is_in(torn["process"].unique().implode()))
        .group_by("process")
        .agg((pl.col("start_ns") + pl.col("duration_ns").fill_null(0).clip(lower_bound=0)).max())
    )
    return dict(last.iter_rows())


def _closed(spans: pl.DataFrame, last_ns: dict[int, int]) -> pl.DataFrame:
    """Add ``end_ns``; an open span lasts until the last thing its process recorded."""
    end = pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)
    if last_ns:
        until = pl.col("process").replace_strict(last_ns, default=None, return_dtype=pl.Int64)
        end = pl.when(pl.col("duration_ns").is_null()).then(until).otherwise(end)
    return spans.with_columns(end_ns=end)


def _split_threads(spans: pl.DataFrame, steps: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return what the ranks' main threads were in, and collectives beside them.

    A rank that was started again has a main thread each time.
    """
    main = dict(
        steps.group_by("process")
        .agg(pl.col("thread").drop_nulls().first())
        .drop_nulls()
        .iter_rows()
    )
    main_thread = pl.col("process").replace_strict(main, default=None, return_dtype=pl.Int64)
    collective = pl.col("kind") == "collective"
    on_main = (pl.col("thread") == main_thread).fill_null(value=True)
    kept = pl.col("rank").is_in(steps["rank"].unique().implode())
    if spans["attributes"].null_count() < len(spans):
        # Issued without blocking: the span lasts to its completion, the thread went on.
        on_main &= ~(collective & _flag("async"))
        spans = spans.with_columns(
            kind=pl.when(_flag("evaluates")).then(pl.lit("evaluation")).otherwise("kind")
        )
    inner = spans.filter(kept & on_main & ~pl.col("kind").is_in(["step", "note"]))
    aside = spans.filter(kept & ~on_main & collective)
    columns = ["rank", "kind", "start_ns", "end_ns"]
    return inner.select(columns), aside.select(*columns, "attributes")


def _cut_at_steps(
    start: Ints, end: Ints, kind: Ints, step_start: Ints, step_end: Ints
) -> tuple[Ints, Ints, Ints]:
    """Split spans at step boundaries; drop what lies outside every step."""
    first = np.maximum(np.searchsorted(step_end, start, side="right"), 0)
    last = np.searchsorted(step_start, end, side="left") - 1
    pieces = np.maximum(last - first + 1, 0)
    owner = np.repeat(np.arange(len(start)), pieces)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    step = first[owner] + offset
    cut_start = np.maximum(start[owner], step_start[step])
    cut_end = np.minimum(end[owner], step_end[step])
    keep = cut_end > cut_start
    return cut_start[keep], cut_end[keep], kind[owner][keep]


def _self_times(start: Ints, end: Ints, kind: Ints) -> tuple[Ints, Ints, Ints]:
    """Sweep one axis: return order, self time and booking class of each span in that order.

    Depth of a span is the number of spans open at its start; its parent is the latest span one
    level up. Levels are then clipped from the top down, so self times are never negative.
    """
    # Steps sort before what starts with them, longer before shorter.
    order = np.lexsort((-end, kind != _STEP, start))
    start, end, kind = start[order], end[order], kind[order]
    count = len(start)
    depth = np.arange(count) - np.searchsorted(np.sort(end), start, side="right")
    depth[kind == _STEP] = 0
    own = np.zeros(count, dtype=np.int64)
    booked = np.full(count, _OTHER, dtype=np.int64)
    position = np.arange(count)
    above = np.full(count, -1, dtype=np.int64)
    for level in range(int(depth.max(initial=-1)) + 1):
        here = np.flatnonzero(depth == level)
        if len(here) == 0:
            continue
        if level > 0:
            parent = above[here]
            start[here] = np.maximum(start[here], start[parent])
            end[here] = np.minimum(end[here], end[parent])
        # Of two overlapping siblings the earlier keeps the time.
        reached = np.maximum.accumulate(end[here])
        start[here[1:]] = np.maximum(start[here[1:]], reached[:-1])
        end[here] = np.maximum(end[here], start[here])
        length = end[here] - start[here]
        own[here] = length
        if level > 0:
            np.subtract.at(own, parent, length)
            booked[here] = _RULES[booked[parent], kind[here]]
        above = np.maximum.accumulate(np.where(depth == level, position, -1))
    return order, own, booked


def step_rows(
    spans: pl.DataFrame,
    *,
    facts: RunFacts | None = None,
    resources: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return one row per rank and step, in the ``steps`` schema plus ``run_delay_ns``.

    ``spans`` follows the ``spans`` schema; open spans have a null duration. A step that never
    ended is kept, lasts until the last thing its process recorded, and has ``complete`` false.
    ``resources`` holds ``rank, step, id, tokens, flops, peak_rss_bytes`` of step spans and, where
    recorded, ``queued_ns`` of phases; what is in neither comes from ``facts``.
    """
    spans = spans.select(_COLUMNS).with_columns(process=_process())
    bounds = _rank_bounds(spans)
    if len(bounds) > 1:
        return pl.concat(
            step_rows(
                spans.filter((pl.col("rank") >= first) & (pl.col("rank") < end)),
                facts=facts,
                resources=resources,
            )
            for first, end in bounds
        )
    narrow = spans.select(
        "rank", "process", "kind", "start_ns", "duration_ns", "thread", "attributes"
    )
    last_ns = _last_record(narrow)
    steps = _closed(
        spans.filter(pl.col("rank").is_not_null() & (pl.col("kind") == "step")), last_ns
    ).sort("rank", "start_ns")
    if steps.is_empty():
        return pl.DataFrame(schema=_STEP_ROWS)
    inner, aside = _split_threads(_closed(narrow, last_ns), steps)
    phases = _phase_columns(steps, inner, aside)
    if resources is not None and not resources.is_empty():
        known = resources.filter(pl.col("kind") == "step").unique(["rank", "id"], keep="last")
        steps = steps.join(
            known.select("rank", "id", "tokens", "flops", "peak_rss_bytes"),
            on=["rank", "id"],
            how="left",
            maintain_order="left",
        ).join(_run_delays(resources), on=["rank", "step"], how="left", maintain_order="left")
    else:
        steps = steps.with_columns(
            tokens=_attribute("tokens").cast(pl.Float64, strict=False),
            flops=_attribute("flops").cast(pl.Float64, strict=False),
            peak_rss_bytes=_attribute("peak_rss_bytes").cast(pl.Int64, strict=False),
            run_delay_ns=_attribute("run_delay_ns").cast(pl.Int64, strict=False),
        )
    rows = steps.select(
        "run",
        "rank",
        "step",
        "start_ns",
        duration_ns=pl.Series(phases.sum(axis=1)),
        **{f"{p.value}_ns": pl.Series(phases[:, n]) for n, p in enumerate(PHASES)},
        complete=pl.col("duration_ns").is_not_null() & ~_flag("incomplete"),
        tokens="tokens",
        flops="flops",
        energy_j=_attribute("energy_j").cast(pl.Float64, strict=False),
        nic_bytes=_attribute("nic_bytes").cast(pl.Int64, strict=False),
        cpu_ns="cpu_ns",
        peak_rss_bytes="peak_rss_bytes",
        **dict.fromkeys(_FROM_SAMPLES, pl.lit(None)),
        run_delay_ns="run_delay_ns",
    )
    return _with_facts(rows, facts).cast(dict(_STEP_ROWS)).select(list(_STEP_ROWS))  # type: ignore[arg-type]


def _rank_bounds(spans: pl.DataFrame) -> list[tuple[int, int]]:
    """Cut millions of spans by rank: the sweep's arrays stay small. Ranks never meet in it."""
    count = -(-len(spans) // _SPANS_AT_ONCE)
    ranks = spans["rank"].drop_nulls().unique().sort().to_list() if count > 1 else []
    firsts = ranks[:: -(-len(ranks) // count)] if ranks else []
    return list(zip(firsts, [*firsts[1:], ranks[-1] + 1], strict=True)) if ranks else []


def _run_delays(resources: pl.DataFrame) -> pl.DataFrame:
    """Return ``rank, step, run_delay_ns``: what the thread's run-queue wait grew by in the step.

    The counter is read when phases close, so from the last close of one step to the next one's.
    """
    if "queued_ns" not in resources.columns:
        return pl.DataFrame(schema={"rank": pl.Int32, "step": pl.Int32, "run_delay_ns": pl.Int64})
    grew = pl.col("queued_ns") - pl.col("queued_ns").shift(1).over("rank", "life")
    return (
        _queued(resources)
        .group_by("rank", "life", "step")
        .agg(pl.col("queued_ns").max())
        .sort("rank", "life", "step")
        .select("rank", "step", run_delay_ns=grew.clip(lower_bound=0))
        .unique(["rank", "step"], keep="last", maintain_order=True)
    )


def _queued(resources: pl.DataFrame) -> pl.DataFrame:
    """Return where the counter was read, and in which process of its rank (``life``)."""
    known = resources.filter(pl.col("queued_ns").is_not_null() & pl.col("step").is_not_null())
    life = process_of("id") if "id" in known.columns else pl.lit(0)
    return known.with_columns(life=life)


def process_of(column: str) -> pl.Expr:
    """Return which process of its rank a span is from: 0, or more where it was started again."""
    return pl.col(column) // (1 << PROCESS_SHIFT) % (1 << (LANE_SHIFT - PROCESS_SHIFT))


def _process() -> pl.Expr:
    """Return a number of the process that a span is from, unique in the run."""
    first = pl.col("rank").cast(pl.Int64) * (1 << LANE_SHIFT - PROCESS_SHIFT)
    return first + process_of("id").fill_null(0)


def _attribute(key: str) -> pl.Expr:
    return pl.col("attributes").str.json_path_match(f"$.{key}")


def _flag(name: str) -> pl.Expr:
    """Return whether a recorder's flag is set; its JSON is compact, so text search will do."""
    return pl.col("attributes").str.contains(f'"{name}":true', literal=True).fill_null(value=False)


def _phase_columns(steps: pl.DataFrame, inner: pl.DataFrame, aside: pl.DataFrame) -> Ints:
    """Return ``(steps, phases)`` nanoseconds, rows as in ``steps``."""
    parts = [steps, inner, aside]
    rank = np.concatenate([part["rank"].to_numpy() for part in parts])
    start = np.concatenate([part["start_ns"].to_numpy() for part in parts])
    end = np.concatenate([part["end_ns"].to_numpy() for part in parts])
    axis, index = _axis(rank, start, end)
    start, end = axis.place(index, start), axis.place(index, end)
    first, second = len(steps), len(steps) + len(inner)

    step_start = start[:first]
    step_end = end[:first].copy()
    # Steps tile: one that overlaps its successor (a torn write) ends where that one starts.
    step_end[:-1] = np.minimum(step_end[:-1], step_start[1:])
    kinds = _kind_codes(inner["kind"])
    cut = _cut_at_steps(start[first:second], end[first:second], kinds, step_start, step_end)
    order, own, booked = _self_times(
        np.concatenate([step_start, cut[0]]),
        np.concatenate([step_end, cut[1]]),
        np.concatenate([np.full(first, _STEP, dtype=np.int64), cut[2]]),
    )
    step_of = np.concatenate(
        [np.arange(first), np.searchsorted(step_start, cut[0], side="right") - 1]
    )[order]
    phases = np.zeros((first, _CLASSES), dtype=np.int64)
    np.add.at(phases, (step_of, booked), own)
    phases[:, _OTHER] += phases[:, _EVALUATION]
    phases = phases[:, : len(PHASES)]
    if len(aside):
        waits = inner["kind"].to_numpy() == "collective_wait"
        saw_waits = np.zeros(len(axis.ranks), dtype=bool)
        saw_waits[index[first:second][waits]] = True
        blind = ~saw_waits[index[second:]]
        backward = (kinds == _BACKWARD) & ~saw_waits[index[first:second]]
        exposed = _exposed_aside(
            start[first:second][backward],
            end[first:second][backward],
            start[second:][blind],
            end[second:][blind],
            _issued(aside, axis, index[second:])[blind],
        )
        owner = np.searchsorted(step_start, start[first:second][backward], side="right") - 1
        moved = np.zeros(first, dtype=np.int64)
        np.add.at(moved, owner[owner >= 0], exposed[owner >= 0])
        moved = np.minimum(moved, phases[:, _BACKWARD])
        phases[:, _BACKWARD] -= moved
        phases[:, _COLLECTIVE] += moved
    return phases


def _issued(aside: pl.DataFrame, axis: _Axis, index: Ints) -> Ints:
    """Return when each collective of another thread was issued, on the axis."""
    told = aside.select(_attribute("issued_ns").cast(pl.Int64, strict=False)).to_series()
    issued = told.fill_null(aside["start_ns"]).to_numpy()
    return axis.place(index, issued)


def _exposed_aside(start: Ints, end: Ints, c_start: Ints, c_end: Ints, issued: Ints) -> Ints:
    """Return, for each backward, how long it could only wait for collectives of other threads.

    That is the union of those collectives inside [last issue in the backward, its end].
    """
    exposed = np.zeros(len(start), dtype=np.int64)
    order = np.lexsort((c_end, c_start))
    c_start, c_end, issued = c_start[order], c_end[order], issued[order]
    for number in range(len(start)):
        low = np.searchsorted(c_start, start[number], side="left")
        high = np.searchsorted(c_start, end[number], side="left")
        if high == low:
            continue
        tail = max(int(issued[low:high].max()), int(start[number]))
        reached = tail
        for begin, finish in zip(c_start[low:high].tolist(), c_end[low:high].tolist(), strict=True):
            upto = min(finish, int(end[number]))
            if upto > reached:
                exposed[number] += upto - max(begin, reached)
                reached = upto
    return exposed


def _with_facts(rows: pl.DataFrame, facts: RunFacts | None) -> pl.DataFrame:
    """Fill tokens and FLOPs of complete steps from what the ranks said of themselves."""
    if facts is None:
        return rows
    known = pl.DataFrame(
        {
            "rank": [rank.rank for rank in facts.ranks],
            "fact_tokens": [rank.tokens_per_step for rank in facts.ranks],
            "fact_flops": [rank.model_flops_per_step for rank in facts.ranks],
        },
        schema={"rank": pl.Int32, "fact_tokens": pl.Float64, "fact_flops": pl.Float64},
    ).unique("rank")
    return (
        rows.with_columns(pl.col("rank").cast(pl.Int32))
        .join(known, on="rank", how="left", maintain_order="left")
        .with_columns(
            tokens=pl.coalesce("tokens", pl.when("complete").then("fact_tokens")),
            flops=pl.coalesce("flops", pl.when("complete").then("fact_flops")),
        )
        .drop("fact_tokens", "fact_flops")
    )


def merge_steps(from_spans: pl.DataFrame, kept: pl.DataFrame | None) -> pl.DataFrame:
    """Join step rows made from spans with rows kept beside them; a complete row made here wins."""
    if kept is None or kept.is_empty():
        return from_spans
    older = [name for name in _STEP_ROWS if name not in kept.columns]
    kept = kept.with_columns(pl.lit(None).alias(name) for name in older)
    kept = kept.select(list(_STEP_ROWS)).cast(dict(_STEP_ROWS))  # type: ignore[arg-type]
    have = from_spans.select("rank", "step")
    rest = kept.join(have, on=["rank", "step"], how="anti")
    return pl.concat([from_spans, rest]).sort("rank", "step")


def queue_rows(resources: pl.DataFrame) -> pl.DataFrame:
    """Return ``rank, step, kind, queue_ns``: run-queue wait in each phase of each step.

    What the counter grew by from the close of the phase before, so it includes the gap between.
    """
    if "queued_ns" not in resources.columns:
        return pl.DataFrame(schema=_QUEUE_ROWS)
    grew = pl.col("queued_ns") - pl.col("queued_ns").shift(1).over("rank", "life")
    return (
        _queued(resources)
        .sort("rank", "life", "queued_ns")
        .with_columns(queue_ns=grew.clip(lower_bound=0))
        .group_by("rank", "step", "kind")
        .agg(pl.col("queue_ns").sum())
        .sort("rank", "step", "kind")
    )


def cut_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that were closed because the recording ended, not the step."""
    cut = spans.filter((pl.col("kind") == "step") & pl.col("duration_ns").is_not_null())
    return cut.filter(_flag("incomplete") & pl.col("rank").is_not_null())


def gc_rows(spans: pl.DataFrame) -> pl.DataFrame:
    """Return garbage-collection time per rank and step: ``rank, step, gc_ns, pauses``."""
    return (
        spans.filter((pl.col("kind") == "gc") & pl.col("step").is_not_null())
        .group_by("rank", "step")
        .agg(gc_ns=pl.col("duration_ns").fill_null(0).sum(), pauses=pl.len())
        .sort("rank", "step")
    )
