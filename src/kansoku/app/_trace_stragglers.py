"""Use case ``trace stragglers``: who comes last to the collectives, and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kansoku.app._few_ranks import few_ranks
from kansoku.app._trace_kinds import files_of
from kansoku.app._trace_set import Progress, given_ranks, is_own_run, map_traces, rank_verdicts
from kansoku.errors import InputError
from kansoku.trace.kineto.arrival_rows import rank_arrivals
from kansoku.trace.kineto.arrivals import Arrival, ArrivalPolicy, ArrivalReport, find_stragglers
from kansoku.trace.kineto.ranks import missing_ranks
from kansoku.view import Block, Column, Sentence, Table, Tone, View

if TYPE_CHECKING:
    import polars as pl

__all__ = ["StragglersResult", "stragglers"]

SCHEMA = "kansoku.trace.stragglers/1"


@dataclass(frozen=True, kw_only=True)
class StragglersResult:
    """Stragglers of a set of traces; tables are Polars DataFrames."""

    report: ArrivalReport
    remarks: tuple[str, ...]

    @cached_property
    def stragglers(self) -> "pl.DataFrame":
        """One row per straggler."""
        import polars as pl

        return pl.DataFrame(self._stragglers(), infer_schema_length=None)

    @cached_property
    def collectives(self) -> "pl.DataFrame":
        """One row per matched collective."""
        import polars as pl

        return pl.DataFrame(self._collectives(), infer_schema_length=None)

    def _stragglers(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": row.rank,
                "lateness_us": row.lateness_ns / 1000,
                "share": row.share,
                "confidence": row.confidence,
            }
            for row in self.report.stragglers
        ]

    def _collectives(self) -> list[dict[str, Any]]:
        return [
            {
                "group": row.group,
                "seq": row.sequence,
                "op": row.operation,
                "first_rank": row.first_rank,
                "last_rank": row.last_rank,
                "spread_us": row.spread_ns / 1000,
            }
            for row in self.report.collectives
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        report = self.report
        return {
            "schema": SCHEMA,
            "verdict": report.verdict,
            "reason": report.reason,
            "stragglers": self._stragglers(),
            "collectives": self._collectives(),
            "imposed_wait_us": [
                {"rank": rank, "wait_us": wait / 1000}
                for rank, wait in sorted(report.imposed_wait_ns.items())
            ],
            "clock_offsets_us": [
                {"rank": rank, "offset_us": offset / 1000}
                for rank, offset in sorted(report.offsets_ns.items())
            ],
            "arrivals": [
                {
                    "group": row.group,
                    "seq": row.sequence,
                    "ranks": [rank for rank, _ in row.arrivals],
                    "after_first_us": [at / 1000 for _, at in row.arrivals],
                    "end_spread_us": row.end_spread_ns / 1000,
                }
                for row in report.collectives
            ],
            "incomplete": list(self.remarks),
        }

    def view(self) -> View:
        """Return the screen."""
        report = self.report
        tone = {"found": Tone.BAD, "none": Tone.GOOD}.get(report.verdict, Tone.NOTICE)
        blocks: list[Block] = [Sentence(text=report.reason, tone=tone)]
        blocks += [Sentence(text=remark, tone=Tone.NOTICE) for remark in self.remarks]
        if report.stragglers:
            blocks.append(
                Table(
                    title="Stragglers",
                    columns=[
                        Column(title="rank", numeric=True),
                        Column(title="mean lateness ms", numeric=True),
                        Column(title="share of the wait", numeric=True),
                        Column(title="came last", numeric=True),
                        Column(title="confidence", numeric=True),
                    ],
                    rows=[
                        [
                            str(row.rank),
                            f"{row.lateness_ns / 1e6:,.3f}",
                            f"{row.share:.1%}",
                            f"{row.last_count} of {row.collectives}",
                            f"{row.confidence:.4f}",
                        ]
                        for row in report.stragglers
                    ],
                )
            )
        rows = [
            [
                row.group,
                str(row.sequence),
                row.operation,
                len(row.arrivals),
                str(row.first_rank),
                str(row.last_rank),
                f"{row.spread_ns / 1e6:,.3f}",
                f"{row.end_spread_ns / 1000:,.1f}",
            ]
            for row in report.collectives
        ]
        blocks.append(
            Table(
                title="Collectives in order",
                columns=[
                    Column(title="group"),
                    Column(title="seq", numeric=True),
                    Column(title="operation"),
                    Column(title="ranks", numeric=True),
                    Column(title="first", numeric=True),
                    Column(title="last", numeric=True),
                    Column(title="arrival spread ms", numeric=True),
                    Column(title="ends differ µs", numeric=True),
                ],
                rows=rows[:40],
                note=f"the first 40 of {len(rows)}; --json has all" if len(rows) > 40 else None,
            )
        )
        return View(title="Trace stragglers", blocks=blocks)


def stragglers(
    paths: Sequence[Path | str],
    *,
    ranks: Sequence[str] = (),
    policy: ArrivalPolicy | None = None,
    processes: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> StragglersResult:
    """Match the collectives of many ranks and name those that the others wait for.

    Paths hold Kineto traces of one job, or NCCL Inspector's files of its ranks, or are one run
    directory of ``kansoku run``.
    """
    if len(paths) == 1 and is_own_run(Path(paths[0])):
        return _own_run(Path(paths[0]), policy)
    if files := files_of("inspector", paths):
        return _inspector(files, policy)
    parts = map_traces(
        rank_arrivals, paths, processes=processes, scheduler=scheduler, progress=progress
    )
    claims, verdicts = rank_verdicts(parts, given_ranks(ranks))
    by_rank: dict[int, Sequence[Arrival]] = {}
    remarks: list[str] = []
    for part, verdict in zip(parts, verdicts, strict=True):
        remarks += [f"{part.file}: {why}" for why in (*part.incomplete, *verdict.problems)]
        if verdict.rank is not None and verdict.rank not in by_rank:
            by_rank[verdict.rank] = part.arrivals
    if absent := missing_ranks(claims, verdicts):
        shown = ", ".join(str(rank) for rank in absent[:16])
        more = f" and {len(absent) - 16} more" if len(absent) > 16 else ""
        remarks.append(f"ranks without a file: {shown}{more}")
    return StragglersResult(report=find_stragglers(by_rank, policy), remarks=tuple(remarks))


def _inspector(files: Sequence[Path], policy: ArrivalPolicy | None) -> StragglersResult:
    from kansoku.app._trace_inspector import inspector_arrivals, read_ranks

    parts = read_ranks(files)
    remarks = ["NCCL Inspector: arrivals are told by durations, members taken to end together"]
    remarks += [
        f"{part.file}: {part.damaged} damaged stretches were left out"
        for part in parts
        if part.damaged
    ]
    report = find_stragglers(inspector_arrivals(parts), policy)
    return StragglersResult(report=report, remarks=tuple(remarks))


def _own_run(path: Path, policy: ArrivalPolicy | None) -> StragglersResult:
    from kansoku.app._trace_own_run import own_run_clocks, own_run_stragglers
    from kansoku.formats.run_directory import read_run

    data = read_run(path)
    clocks = own_run_clocks(data)
    report = own_run_stragglers(data, clocks, policy)
    if not report.offsets_ns:
        raise InputError("the run recorded no finished collective", where=str(path))
    remarks = (*data.missing, *clocks.notes)
    if clocks.unmatched:
        alone = few_ranks(clocks.unmatched)
        remarks += (f"{alone}: too few collectives shared with other hosts to align the clocks",)
    return StragglersResult(report=report, remarks=remarks)
