"""Operations of a pipeline-parallel run of ours, from the spans that its ranks recorded.

Own work is a micro-batch's forward or backward less the time its thread was blocked in
collectives. Sends and receives keep their times; of a pair the receive tells when the data was
there. Collectives over data parallelism may stand anywhere in a step, in many pieces: of each piece
the least time that any member was blocked is transfer (the last to arrive waits for nobody), and
the transfers are replayed in one, before the first forward or after the last backward.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from kansoku.formats.operation_trace import COLUMNS

__all__ = ["RunOperations", "span_operations"]

_MOST_SPANS = 1_000_000
_PHASES = frozenset({"forward", "backward", "optimizer", "checkpoint", "data_wait", "evaluation"})
_PAIRS = {"send": "send", "recv": "recv", "isend": "send", "irecv": "recv"}
# An asynchronous operation is seen to end about when the wait for it does.
_SAME_END_NS = 100_000
_MOVED = (
    "collectives over data parallelism are replayed before the first forward and after the last "
    "backward, whatever ran beside them"
)
_HOST = (
    "times are the host's: what ran between forward, backward and optimizer (loss, Python) is a "
    "host delay and not replayed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOperations:
    """The operations, as :mod:`kansoku.formats.operation_trace` holds them."""

    table: pl.DataFrame
    missing: tuple[str, ...]
    """What the spans do not tell, in sentences."""


@dataclass(slots=True)
class _Transfer:
    start_ns: int
    end_ns: int | None
    """None: issued without blocking, and its end was not seen."""


@dataclass(slots=True)
class _Step:
    """One step of one rank."""

    begin_ns: int
    forward: list[tuple[int, int]] = field(default_factory=list)
    """(start, own work) of each micro-batch."""
    backward: list[tuple[int, int]] = field(default_factory=list)
    data_wait: list[tuple[int, int]] = field(default_factory=list)
    optimizer: list[tuple[int, int]] = field(default_factory=list)
    checkpoint: list[tuple[int, int]] = field(default_factory=list)
    evaluation: list[tuple[int, int]] = field(default_factory=list)
    transfers: dict[str, list[_Transfer]] = field(default_factory=lambda: defaultdict(list))
    blocked: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """``gather``, ``scatter`` or ``clip`` to the time blocked in each piece, ns."""

    def fits(self, stage: int, stages: int) -> bool:
        """Say whether each micro-batch has one backward and one transfer a neighbour."""
        count = len(self.forward)
        wanted = {
            "forward-recv": stage > 0,
            "backward-send": stage > 0,
            "forward-send": stage < stages - 1,
            "backward-recv": stage < stages - 1,
        }
        return (
            count > 0
            and len(self.backward) == count
            and all(len(self.transfers[kind]) == count * there for kind, there in wanted.items())
        )


@dataclass(frozen=True, slots=True)
class _Span:
    step: int
    kind: str
    name: str
    start_ns: int
    end_ns: int | None
    group: str | None
    peer: int | None
    blocks: bool
    """On the thread of the steps, and not issued without blocking."""


def span_operations(
    spans: pl.DataFrame,
    *,
    pipelines: Sequence[Sequence[int]],
    groups: Mapping[tuple[int, str], Sequence[int]],
) -> RunOperations | str:
    """Return the operations of whole steps, or the reason why the spans do not tell them.

    ``spans`` are of the steps to replay, on one clock; ``pipelines`` are the ranks of each pipeline
    in stage order, one a data-parallel rank; ``groups`` maps (rank, group name) to its members.
    """
    places = {
        rank: (dp, stage) for dp, ranks in enumerate(pipelines) for stage, rank in enumerate(ranks)
    }
    stages = len(pipelines[0])
    spans, left_out = _newest(spans)
    missing = [_HOST]
    if left_out:
        missing.append(f"only the newest steps were replayed; {left_out} earlier ones were not")
    steps: dict[int, dict[tuple[int, int], _Step]] = defaultdict(dict)
    for part in spans.filter(pl.col("rank").is_in(list(places))).partition_by("rank"):
        rank = int(part["rank"][0])
        reader = _Reader(rank, places, groups)
        for number, step in reader.read(_spans(part)).items():
            steps[number][places[rank]] = step
    whole = [number for number in sorted(steps) if len(steps[number]) == len(places)]
    if not whole:
        return "no step of all ranks of the pipelines"
    fitting = [
        number
        for number in whole
        if all(step.fits(stage, stages) for (_, stage), step in steps[number].items())
    ]
    if not fitting:
        return (
            "the steps do not hold one forward, one backward and one transfer a neighbour for each "
            "micro-batch: interleaved stages, split backwards, or transfers that were not recorded"
        )
    if len(fitting) < len(steps):
        missing.append(
            f"{len(steps) - len(fitting)} of {len(steps)} steps lack operations and were left out"
        )
    rows = [row for number in fitting for row in _rows(number, steps[number], pipelines)]
    kinds = {row[4] for row in rows}
    if kinds & {"grads-reduce-scatter", "params-all-gather"}:
        missing.append(_MOVED)
    if any(
        transfer.end_ns is None
        for number in fitting
        for step in steps[number].values()
        for transfers in step.transfers.values()
        for transfer in transfers
    ):
        missing.append("ends of some sends and receives were not seen: those transfers are zero")
    schema = {**COLUMNS, "start_ts": pl.Float64(), "duration": pl.Float64()}
    return RunOperations(
        table=pl.DataFrame(rows, schema=list(schema), orient="row").cast(schema),  # type: ignore[arg-type]
        missing=tuple(missing),
    )


def _newest(spans: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return the spans of so many of the last steps as can be read one by one."""
    if len(spans) <= _MOST_SPANS:
        return spans, 0
    counts = spans.group_by("step").len().sort("step", descending=True)
    kept = counts.filter(pl.col("len").cum_sum() <= _MOST_SPANS)["step"]
    return spans.filter(pl.col("step").is_in(kept.implode())), len(counts) - len(kept)


def _spans(part: pl.DataFrame) -> list[_Span]:
    """Return a rank's spans in order of their starts, outer ones first."""
    threads = part.filter(pl.col("kind") == "step")["thread"].drop_nulls()
    main = threads[0] if len(threads) else None
    attributes = pl.col("attributes").fill_null("")
    rows = (
        part.filter(pl.col("step").is_not_null() & pl.col("duration_ns").is_not_null())
        .sort("start_ns", "duration_ns", descending=[False, True])
        .select(
            "step",
            "kind",
            "name",
            "start_ns",
            end=pl.col("start_ns") + pl.col("duration_ns"),
            group="group",
            peer=attributes.str.extract(r'"peer":(\d+)').cast(pl.Int64),
            untimed=attributes.str.contains('"no_times":true', literal=True),
            blocks=~attributes.str.contains('"async":true', literal=True)
            & ((pl.col("thread") == main) | pl.col("thread").is_null() | pl.lit(main is None)),
        )
    )
    return [
        _Span(step, kind, name or "", start, None if untimed else end, group, peer, blocks)
        for step, kind, name, start, end, group, peer, untimed, blocks in rows.iter_rows()
    ]


class _Reader:
    """Books the spans of one rank, in order, on its steps."""

    def __init__(
        self,
        rank: int,
        places: Mapping[int, tuple[int, int]],
        groups: Mapping[tuple[int, str], Sequence[int]],
    ) -> None:
        self._rank, self._places, self._groups = rank, places, groups
        self._steps: dict[int, _Step] = {}
        self._outer: _Span | None = None
        self._blocked_ns = 0
        """In the outer span, so far."""
        self._free_at = 0
        """Where the last blocking piece ended."""
        self._ends: list[tuple[int, str]] = []

    def read(self, spans: list[_Span]) -> dict[int, _Step]:
        """Return the steps by number."""
        self._ends = sorted(
            (span.end_ns, self._class(span))
            for span in spans
            if span.kind == "collective" and not span.blocks and span.end_ns is not None
        )
        for span in spans:
            if span.kind == "step":
                self._steps.setdefault(span.step, _Step(span.start_ns))
        for span in spans:
            step = self._steps.get(span.step)
            if step is not None:
                self._book(span, step)
        self._close()
        return self._steps

    def _book(self, span: _Span, step: _Step) -> None:
        if self._outer is not None and span.start_ns >= (self._outer.end_ns or 0):
            self._close()
        if span.kind in _PHASES and span.blocks:
            if self._outer is None:
                self._outer = span
        elif span.kind == "collective":
            if span.name in _PAIRS:
                self._pair(span, step)
            if span.blocks:
                self._block(span, step, self._class(span))
        elif span.kind == "collective_wait" and span.blocks and span.end_ns is not None:
            self._block(span, step, self._waited_for(span.start_ns, span.end_ns))

    def _close(self) -> None:
        """Book the outer span's own work."""
        span, self._outer = self._outer, None
        if span is not None and span.end_ns is not None:
            step = self._steps.get(span.step)
            if step is not None:
                own = max(span.end_ns - span.start_ns - self._blocked_ns, 0)
                getattr(step, span.kind).append((span.start_ns, own))
        self._blocked_ns = 0

    def _pair(self, span: _Span, step: _Step) -> None:
        peer = self._peer(span)
        if peer not in self._places:
            return
        (dp, stage), (other_dp, other) = self._places[self._rank], self._places[peer]
        if dp != other_dp or abs(stage - other) != 1:
            return
        word = _PAIRS[span.name]
        forward = (word == "send") == (other > stage)
        step.transfers[f"{'forward' if forward else 'backward'}-{word}"].append(
            _Transfer(span.start_ns, span.end_ns)
        )

    def _peer(self, span: _Span) -> int:
        """Return the global rank: peers are numbered within their group."""
        if span.peer is None:
            return -1
        members = self._groups.get((self._rank, span.group or ""), ())
        return members[span.peer] if span.peer < len(members) else span.peer

    def _class(self, span: _Span) -> str:
        """Return whom a collective joins: ``pair``, ``data``, ``all`` (of several stages)."""
        if span.name in _PAIRS:
            return "pair"
        members = self._groups.get((self._rank, span.group or ""), ())
        stages = {self._places[rank][1] for rank in members if rank in self._places}
        return "all" if len(stages) > 1 else "data"

    def _waited_for(self, start_ns: int, end_ns: int) -> str:
        """Return the class of the operation that ended with a wait; ``pair`` where none did."""
        place = bisect_left(self._ends, (end_ns + _SAME_END_NS, ""))
        if place and self._ends[place - 1][0] >= start_ns - _SAME_END_NS:
            return self._ends[place - 1][1]
        return "pair"

    def _block(self, span: _Span, step: _Step, joins: str) -> None:
        if span.end_ns is None:
            return
        start = max(span.start_ns, self._free_at)
        length = max(span.end_ns - start, 0)
        self._free_at = max(self._free_at, span.end_ns)
        kind = ""
        if (outer := self._outer) is not None:
            kind = outer.kind
            self._blocked_ns += max(min(span.end_ns, outer.end_ns or 0) - start, 0)
        if joins == "pair":
            return
        begun = bool(step.backward) or kind in ("backward", "optimizer")
        if joins == "all":
            if begun:
                step.blocked["clip"].append(length)
            return
        step.blocked["scatter" if begun else "gather"].append(length)


_Row = tuple[int, int, int, int, str, int, int, int, int, float, float]


def _rows(
    number: int, cells: Mapping[tuple[int, int], _Step], pipelines: Sequence[Sequence[int]]
) -> Iterable[_Row]:
    """Yield the operations of one step, in seconds from its begin."""
    base = min(step.begin_ns for step in cells.values())
    stages = len(pipelines[0])
    done = {
        stage: max(
            start + own
            for (_, at), step in cells.items()
            if at == stage
            for start, own in step.backward
        )
        for stage in range(stages)
    }
    reduced = {
        stage: done[stage]
        + _transfer_ns(step.blocked["scatter"] for (_, at), step in cells.items() if at == stage)
        for stage in range(stages)
    }
    clipped = max(reduced.values())
    clip = _transfer_ns(step.blocked["clip"] for step in cells.values())
    for (dp, stage), step in cells.items():

        def row(
            kind: str,
            start: int,
            length: int,
            sequence: int = 0,
            *,
            batch: int = -1,
            dp: int = dp,
            stage: int = stage,
        ) -> _Row:
            chunk = -1 if kind.endswith(("send", "recv")) else 0
            return (
                dp,
                stage,
                pipelines[dp][stage],
                number,
                kind,
                sequence,
                chunk,
                batch,
                stage if batch >= 0 else -1,
                (start - base) / 1e9,
                length / 1e9,
            )

        for name, rows in (("forward", step.forward), ("backward", step.backward)):
            for batch, (start, own) in enumerate(rows):
                yield row(f"{name}-compute", start, own, batch, batch=batch)
        for sequence, (start, own) in enumerate(step.data_wait):
            yield row("data-wait", start, own, sequence)
        for kind, transfers in step.transfers.items():
            for sequence, one in enumerate(transfers):
                start, end = _transfer_times(cells, dp, stage, kind, sequence, one)
                yield row(kind, start, end - start, sequence)
        gather = _transfer_ns(s.blocked["gather"] for (_, at), s in cells.items() if at == stage)
        if gather:
            yield row("params-all-gather", base, gather)
        if reduced[stage] > done[stage]:
            yield row("grads-reduce-scatter", done[stage], reduced[stage] - done[stage])
        if clip:
            yield row("optimizer-clip-main-grad", clipped, clip)
        for kind, rows in (("optimizer", step.optimizer), ("checkpoint", step.checkpoint)):
            if rows:
                yield row(kind, clipped + clip, sum(own for _, own in rows))


def _transfer_times(
    cells: Mapping[tuple[int, int], _Step],
    dp: int,
    stage: int,
    kind: str,
    sequence: int,
    one: _Transfer,
) -> tuple[int, int]:
    """Return start and end of a send or receive; both ends are the receive's."""
    direction, _, word = kind.partition("-")
    ahead = (word == "send") == (direction == "forward")
    peer = cells[dp, stage + 1 if ahead else stage - 1]
    other = peer.transfers[f"{direction}-{'recv' if word == 'send' else 'send'}"][sequence]
    receive, send = (other, one) if word == "send" else (one, other)
    met = max(one.start_ns, other.start_ns)
    end = receive.end_ns if receive.end_ns is not None else send.end_ns
    return one.start_ns, met if end is None else max(end, met)


def _transfer_ns(blocked: Iterable[list[int]]) -> int:
    """Return the transfer of pieces that members share: of each the least time blocked."""
    members = list(blocked)
    if len(members) < 2:
        return 0
    if len({len(pieces) for pieces in members}) == 1:
        return sum(map(min, zip(*members, strict=True)))
    return min(map(sum, members))
