"""Use case ``trace breakdown``: read, analyse, number the ranks, draw."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kansoku.app._trace_breakdown_rows import (
    FIELDS,
    collective_rows,
    copy_rows,
    cost_row,
    figures_us,
    idle_rows,
    kernel_rows,
    launch_rows,
    queue_rows,
    step_rows,
    us,
)
from kansoku.app._trace_kinds import files_of
from kansoku.app._trace_set import (
    Progress,
    given_ranks,
    is_own_run,
    map_traces,
    rank_verdicts,
    short_name,
)
from kansoku.catalog.kernels import kernel_rules
from kansoku.trace.kineto.ranks import missing_ranks
from kansoku.trace.kineto.report import RankBreakdown, break_down, break_down_together
from kansoku.trace.kineto.tables import CollectiveRow
from kansoku.view import Block, Column, Sentence, Series, Table, Tone, View
from kansoku.view import Line as ViewLine

if TYPE_CHECKING:
    import polars as pl

__all__ = ["BreakdownResult", "breakdown"]

SCHEMA = "kansoku.trace.breakdown/1"

kernel_rules()  # read with the modules: no breakdown goes without them

_FIGURES = ("span", "busy", "idle", "compute", "comm", "memory", "overlap", "exposed_comm")
_TOP_ROWS = 20


@dataclass(frozen=True, kw_only=True)
class BreakdownResult:
    """The breakdown of a set of traces; tables are Polars DataFrames."""

    parts: tuple[RankBreakdown, ...]
    """One per file, in rank order."""
    ranks_of: tuple[int | None, ...]
    """The rank of each part."""
    rank_sources: tuple[str | None, ...]
    incomplete_of: tuple[tuple[str, ...], ...]
    missing: tuple[int, ...] | None
    """Ranks of the job that no file holds; None where the world size is unknown."""

    @cached_property
    def ranks(self) -> "pl.DataFrame":
        """One row per file: the figures, µs."""
        import polars as pl

        return pl.DataFrame(self._rank_rows(), infer_schema_length=None)

    @cached_property
    def steps(self) -> "pl.DataFrame":
        """One row per rank and step."""
        import polars as pl

        return pl.DataFrame(step_rows(self._each()), infer_schema_length=None)

    @cached_property
    def kernels(self) -> "pl.DataFrame":
        """One row per rank and kernel name."""
        import polars as pl

        return pl.DataFrame(kernel_rows(self._each()), infer_schema_length=None)

    @cached_property
    def collectives(self) -> "pl.DataFrame":
        """One row per collective kernel."""
        import polars as pl

        return pl.DataFrame(collective_rows(self._each()), infer_schema_length=None)

    def _each(self) -> list[tuple[int | None, RankBreakdown]]:
        return list(zip(self.ranks_of, self.parts, strict=True))

    def _rank_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "file": part.file,
                **figures_us(part.figures),
                "incomplete": list(incomplete),
            }
            for (rank, part), incomplete in zip(self._each(), self.incomplete_of, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer; the keys beyond the first five are details."""
        each = self._each()
        return {
            "schema": SCHEMA,
            "ranks": self._rank_rows(),
            "steps": step_rows(each),
            "kernels": kernel_rows(each),
            "collectives": collective_rows(each),
            "missing_ranks": None if self.missing is None else list(self.missing),
            "rank_sources": [
                {"rank": rank, "file": part.file, "source": source}
                for (rank, part), source in zip(each, self.rank_sources, strict=True)
            ],
            "idle": idle_rows(each),
            "outside_steps": [
                {"rank": rank, "busy_us": us(part.outside_steps_busy_ns)} for rank, part in each
            ],
            "launches": launch_rows(each),
            "queues": queue_rows(each),
            "copies": copy_rows(each),
            "modules": [cost_row(rank, row) for rank, part in each for row in part.modules],
            "annotations": [cost_row(rank, row) for rank, part in each for row in part.annotations],
            "operators": [
                {"rank": rank, "name": name, "calls": calls, "host_us": us(total)}
                for rank, part in each
                for name, calls, total in part.operators
            ],
            "host": [
                {"rank": rank, "span_us": us(part.host_span_ns), "events": part.rows}
                for rank, part in each
            ],
            "notes": [
                {"rank": rank, "file": part.file, "note": note}
                for rank, part in each
                for note in part.notes
            ],
        }

    def view(self) -> View:
        """Return the screen: ranks, steps, kernels, idle, collectives, what is incomplete."""
        blocks: list[Block] = [self._rank_table(), *self._remarks()]
        if any(part.idle for part in self.parts):
            blocks += [self._chart(), self._idle_table()]
        if any(len(part.steps) > 1 for part in self.parts):
            blocks.append(self._step_table())
        blocks += self._kernel_tables()
        blocks += self._other_tables()
        return View(title="Trace breakdown", blocks=blocks)

    def _rank_table(self) -> Table:
        columns = [Column(title="rank", numeric=True)]
        columns += [Column(title=f"{name.replace('_', ' ')} ms", numeric=True) for name in _FIGURES]
        rows = [
            [
                "?" if rank is None else str(rank),
                *(_ms(getattr(part.figures, field)) for field in FIELDS.values()),
            ]
            for rank, part in self._each()
        ]
        return Table(title="Ranks", columns=columns, rows=rows)

    def _chart(self) -> Series:
        names = ["?" if rank is None else str(rank) for rank in self.ranks_of]
        x = [float(number) for number in range(len(names))]

        def line(name: str, values: list[float | None]) -> ViewLine:
            return ViewLine(name=name, x=x, y=values)

        def share(part: RankBreakdown, value: int | None) -> float | None:
            span = part.figures.span_ns
            return None if value is None or not span else value / span

        return Series(
            title="Share of the span by rank",
            x_title="rank",
            y_title="ratio of the span",
            style="bar",
            x_labels=names,
            lines=[
                line("busy", [share(p, p.figures.busy_ns) for p in self.parts]),
                line(
                    "exposed communication",
                    [share(p, p.figures.exposed_communication_ns) for p in self.parts],
                ),
                line("idle", [share(p, p.figures.idle_ns) for p in self.parts]),
            ],
        )

    def _remarks(self) -> list[Block]:
        out: list[Block] = []
        for (rank, part), incomplete in zip(self._each(), self.incomplete_of, strict=True):
            name = Path(part.file.rpartition("!")[2]).name if rank is None else f"rank {rank}"
            out += [
                Sentence(text=f"incomplete, {name}: {why}", tone=Tone.NOTICE) for why in incomplete
            ]
            out += [Sentence(text=f"{name}: {note}", tone=Tone.MUTED) for note in part.notes]
        if self.missing:
            shown = ", ".join(str(rank) for rank in self.missing[:16])
            more = f" and {len(self.missing) - 16} more" if len(self.missing) > 16 else ""
            out.append(Sentence(text=f"ranks without a file: {shown}{more}", tone=Tone.NOTICE))
        return out

    def _idle_table(self) -> Table:
        return Table(
            title="Idle time by reason",
            columns=[
                Column(title="rank", numeric=True),
                Column(title="host-bound ms", numeric=True),
                Column(title="kernel wait ms", numeric=True),
                Column(title="other ms", numeric=True),
                Column(title="launch delay median µs", numeric=True),
                Column(title="queue max", numeric=True),
            ],
            rows=[
                [
                    "?" if rank is None else str(rank),
                    _ms(part.idle.host_bound_ns),
                    _ms(part.idle.kernel_wait_ns),
                    _ms(part.idle.other_ns),
                    None
                    if part.launches is None or part.launches.delay_median_ns is None
                    else f"{part.launches.delay_median_ns / 1000:,.1f}",
                    max((row.max_length for row in part.queues), default=None),
                ]
                for rank, part in self._each()
                if part.idle is not None
            ],
            note="host-bound: the next row was launched after the device had run dry; other: "
            "launched in time, waiting for a dependency",
        )

    def _step_table(self) -> Table:
        rows = [
            [
                "?" if rank is None else str(rank),
                None if step.step is None else str(step.step),
                _ms(step.end_ns - step.start_ns),
                *(
                    _ms(getattr(step.figures, FIELDS[name]))
                    for name in ("busy", "idle", "compute", "comm", "exposed_comm")
                ),
            ]
            for rank, part in self._each()
            for step in part.steps
        ]
        titles = ("span ms", "busy ms", "idle ms", "compute ms", "comm ms", "exposed comm ms")
        return Table(
            title="Steps",
            columns=[
                Column(title="rank", numeric=True),
                Column(title="step", numeric=True),
                *(Column(title=title, numeric=True) for title in titles),
            ],
            rows=rows[:64],
            note=f"the first 64 of {len(rows)}; --json has all" if len(rows) > 64 else None,
        )

    def _kernel_tables(self) -> list[Block]:
        rows = [row for part in self.parts for row in part.kernels]
        if not rows:
            return []
        # Summed in plain Python: loading Polars takes longer than a small trace.
        kinds: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        named: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for row in rows:
            for entry in (kinds[row.kind, row.family], named[row.name, row.kind]):
                entry[0] += row.calls
                entry[1] += row.total_ns
        total = sum(row.total_ns for row in rows) or 1
        return [
            Table(
                title="Device work by kind, all ranks",
                columns=[
                    Column(title="kind"),
                    Column(title="family"),
                    Column(title="calls", numeric=True),
                    Column(title="total ms", numeric=True),
                    Column(title="share", numeric=True),
                ],
                rows=[
                    [kind, family, calls, _ms(ns), f"{ns / total:.1%}"]
                    for (kind, family), (calls, ns) in sorted(
                        kinds.items(), key=lambda item: (-item[1][1], item[0][1])
                    )
                ],
            ),
            Table(
                title=f"Top {_TOP_ROWS} kernels, all ranks",
                columns=[
                    Column(title="name"),
                    Column(title="kind"),
                    Column(title="calls", numeric=True),
                    Column(title="total ms", numeric=True),
                    Column(title="mean µs", numeric=True),
                ],
                rows=[
                    [short_name(name), kind, calls, _ms(ns), f"{ns / calls / 1000:,.1f}"]
                    for (name, kind), (calls, ns) in sorted(
                        named.items(), key=lambda item: (-item[1][1], item[0])
                    )[:_TOP_ROWS]
                ],
            ),
        ]

    def _other_tables(self) -> list[Block]:
        out: list[Block] = []
        if any(part.copies for part in self.parts):
            out.append(
                Table(
                    title="Memory copies",
                    columns=[
                        Column(title="rank", numeric=True),
                        Column(title="direction"),
                        Column(title="calls", numeric=True),
                        Column(title="MB", numeric=True),
                        Column(title="total ms", numeric=True),
                        Column(title="GB/s", numeric=True),
                    ],
                    rows=[
                        [
                            "?" if rank is None else str(rank),
                            row.name,
                            row.calls,
                            None if row.bytes is None else f"{row.bytes / 1e6:,.3f}",
                            _ms(row.total_ns),
                            None if row.bytes_per_s is None else f"{row.bytes_per_s / 1e9:,.2f}",
                        ]
                        for rank, part in self._each()
                        for row in part.copies
                    ][:64],
                )
            )
        if any(part.collectives for part in self.parts):
            out.append(self._collective_table())
        costs = [(r, "module", row) for r, part in self._each() for row in part.modules[:5]]
        costs += [
            (r, "annotation", row) for r, part in self._each() for row in part.annotations[:5]
        ]
        if costs:
            out.append(
                Table(
                    title="Modules and annotations",
                    columns=[
                        Column(title="rank", numeric=True),
                        Column(title="what"),
                        Column(title="name"),
                        Column(title="calls", numeric=True),
                        Column(title="host ms", numeric=True),
                        Column(title="device ms", numeric=True),
                    ],
                    rows=[
                        [
                            "?" if rank is None else str(rank),
                            what,
                            short_name(row.name),
                            row.calls,
                            _ms(row.host_ns),
                            _ms(row.device_ns),
                        ]
                        for rank, what, row in costs[:40]
                    ],
                )
            )
        return out

    def _collective_table(self) -> Table:
        groups: defaultdict[Any, list[CollectiveRow]] = defaultdict(list)
        for part in self.parts:
            for row in part.collectives:
                groups[row.operation, row.group, row.group_size].append(row)
        order = sorted(groups, key=lambda key: -sum(row.duration_ns for row in groups[key]))
        return Table(
            title="Collectives",
            columns=[
                Column(title="operation"),
                Column(title="group"),
                Column(title="ranks", numeric=True),
                Column(title="calls", numeric=True),
                Column(title="total ms", numeric=True),
                Column(title="MB", numeric=True),
                Column(title="algbw GB/s", numeric=True),
                Column(title="busbw GB/s", numeric=True),
            ],
            rows=[[*key, *_collective_cells(groups[key])] for key in order],
            note="bandwidths: medians, as nccl-tests defines them; kernels include waiting",
        )


def _collective_cells(rows: list[CollectiveRow]) -> list[Any]:
    sizes = [row.bytes for row in rows if row.bytes is not None]

    def middle(values: list[float | None]) -> str | None:
        known = [value for value in values if value is not None]
        return f"{median(known) / 1e9:,.2f}" if known else None

    return [
        len(rows),
        _ms(sum(row.duration_ns for row in rows)),
        f"{sum(sizes) / 1e6:,.1f}" if sizes else None,
        middle([row.algorithm_bytes_per_s for row in rows]),
        middle([row.bus_bytes_per_s for row in rows]),
    ]


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e6:,.3f}"


def _other_formats(paths: Sequence[Path | str]) -> list[RankBreakdown]:
    """Break down what is no Kineto trace; empty where it is one, or nothing."""
    # Loaded when needed: these readers need Polars, which takes longer than a small trace.
    if len(paths) == 1 and is_own_run(Path(paths[0])):
        from kansoku.app._trace_own_run import own_run_breakdowns

        return own_run_breakdowns(Path(paths[0]))
    if files := files_of("inspector", paths):
        from kansoku.app._trace_inspector import inspector_breakdown, read_ranks

        return [inspector_breakdown(part) for part in read_ranks(files)]
    if files := files_of("execution", paths):
        from kansoku.app._trace_execution import execution_breakdown

        return [execution_breakdown(path) for path in files]
    return []


def breakdown(
    paths: Sequence[Path | str],
    *,
    ranks: Sequence[str] = (),
    processes: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> BreakdownResult:
    """Break down Kineto files, folders and archives, or one run directory of ``kansoku run``.

    NCCL Inspector's files and execution traces are told by their content.

    ``ranks`` are ``FILE=N`` for files that do not tell theirs. ``processes`` limits the pool
    (1: stay in this process); ``scheduler`` is the address of a Dask scheduler.
    """
    parts = _other_formats(paths) or map_traces(
        break_down,
        paths,
        processes=processes,
        scheduler=scheduler,
        progress=progress,
        together=break_down_together,
    )
    claims, verdicts = rank_verdicts(parts, given_ranks(ranks))
    missing = missing_ranks(claims, verdicts)
    order = sorted(
        range(len(parts)),
        key=lambda n: (verdicts[n].rank is None, verdicts[n].rank or 0, parts[n].file),
    )
    return BreakdownResult(
        parts=tuple(parts[n] for n in order),
        ranks_of=tuple(verdicts[n].rank for n in order),
        rank_sources=tuple(verdicts[n].source for n in order),
        incomplete_of=tuple((*parts[n].incomplete, *verdicts[n].problems) for n in order),
        missing=None if missing is None else tuple(missing),
    )
