"""Use case ``trace critical-path``: what bounds each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kansoku.app._trace_set import (
    Progress,
    given_ranks,
    is_own_run,
    map_traces,
    rank_verdicts,
    short_name,
)
from kansoku.trace.kineto.critical_path import CRITICAL_KINDS, CriticalPath, RankPaths, RankWalk
from kansoku.view import Block, Column, Sentence, Span, Table, Timeline, Tone, View

if TYPE_CHECKING:
    import polars as pl

__all__ = ["CriticalPathResult", "critical_path"]

SCHEMA = "kansoku.trace.critical_path/1"
_TOP_ROWS = 12
_SHOWN_SPANS = 5000


@dataclass(frozen=True, kw_only=True)
class CriticalPathResult:
    """The critical path of each rank and step."""

    parts: tuple[RankPaths, ...]
    ranks_of: tuple[int | None, ...]
    remarks: tuple[str, ...]

    @cached_property
    def paths(self) -> "pl.DataFrame":
        """One row per rank and step: time on the path by kind, µs."""
        import polars as pl

        return pl.DataFrame(self._paths(), infer_schema_length=None)

    @cached_property
    def segments(self) -> "pl.DataFrame":
        """One row per segment of every path, in time order."""
        import polars as pl

        return pl.DataFrame(
            [
                {
                    "rank": rank,
                    "step": path.step,
                    "kind": kind,
                    "name": name,
                    "start_ns": part.base_ns + low,
                    "duration_us": (high - low) / 1000,
                }
                for rank, part in zip(self.ranks_of, self.parts, strict=True)
                for path in part.paths
                for kind, name, low, high in path.segments
            ],
            infer_schema_length=None,
        )

    def _paths(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "file": part.file,
                "step": path.step,
                "span_us": (path.end_ns - path.start_ns) / 1000,
                "bound_by": path.bound_by,
                **{f"{kind}_us": path.totals_ns[kind] / 1000 for kind in CRITICAL_KINDS},
            }
            for rank, part in zip(self.ranks_of, self.parts, strict=True)
            for path in part.paths
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer; the kinds of a path sum to its span."""
        return {
            "schema": SCHEMA,
            "paths": self._paths(),
            "rows": [
                {
                    "rank": rank,
                    "step": path.step,
                    "kind": row.kind,
                    "name": row.name,
                    "count": row.count,
                    "total_us": row.total_ns / 1000,
                }
                for rank, part in zip(self.ranks_of, self.parts, strict=True)
                for path in part.paths
                for row in path.rows
            ],
            "incomplete": list(self.remarks),
        }

    def view(self) -> View:
        """Return the screen."""
        blocks: list[Block] = []
        rows = self._paths()
        for row in rows[:1]:
            part = row[f"{row['bound_by']}_us"] / row["span_us"]
            blocks.append(
                Sentence(
                    text=f"bound by {row['bound_by'].replace('_', ' ')}: {part:.0%} of the path"
                )
            )
        blocks += [Sentence(text=remark, tone=Tone.NOTICE) for remark in self.remarks]
        titles = [kind.replace("_", " ") for kind in CRITICAL_KINDS]
        blocks.append(
            Table(
                title="Time on the critical path, ms",
                columns=[
                    Column(title="rank", numeric=True),
                    Column(title="step", numeric=True),
                    Column(title="span", numeric=True),
                    *(Column(title=title, numeric=True) for title in titles),
                ],
                rows=[
                    [
                        "?" if row["rank"] is None else str(row["rank"]),
                        None if row["step"] is None else str(row["step"]),
                        f"{row['span_us'] / 1000:,.3f}",
                        *(f"{row[f'{kind}_us'] / 1000:,.3f}" for kind in CRITICAL_KINDS),
                    ]
                    for row in rows[:64]
                ],
            )
        )
        if self.parts and self.parts[0].paths:
            blocks += self._details(self.parts[0].paths[0])
        return View(title="Critical path", blocks=blocks)

    def _details(self, path: CriticalPath) -> list[Block]:
        return [
            Table(
                title="Longest on the first path",
                columns=[
                    Column(title="kind"),
                    Column(title="name"),
                    Column(title="count", numeric=True),
                    Column(title="ms", numeric=True),
                ],
                rows=[
                    [row.kind.replace("_", " "), short_name(row.name) or None, row.count,
                     f"{row.total_ns / 1e6:,.3f}"]
                    for row in path.rows[:_TOP_ROWS]
                ],
            ),
            Timeline(
                title="The first path",
                lanes=[kind.replace("_", " ") for kind in CRITICAL_KINDS],
                spans=[
                    Span(
                        lane=CRITICAL_KINDS.index(kind),
                        start_ns=low - path.start_ns,
                        duration_ns=high - low,
                        name=name or kind,
                        kind=kind,
                    )
                    for kind, name, low, high in path.segments[:_SHOWN_SPANS]
                ],
            ),
        ]  # fmt: skip


def critical_path(
    paths: Sequence[Path | str],
    *,
    steps: bool = True,
    ranks: Sequence[str] = (),
    processes: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> CriticalPathResult:
    """Walk the critical path of each step (``steps=False``: of each whole file).

    Paths hold Kineto traces, or are one run directory of ``kansoku run``.
    """
    if len(paths) == 1 and is_own_run(Path(paths[0])):
        from kansoku.app._trace_own_run import own_run_paths

        parts = own_run_paths(Path(paths[0]), steps=steps)
    else:
        parts = map_traces(
            RankWalk(steps=steps),
            paths,
            processes=processes,
            scheduler=scheduler,
            progress=progress,
        )
    _, verdicts = rank_verdicts(parts, given_ranks(ranks))
    order = sorted(
        range(len(parts)),
        key=lambda n: (verdicts[n].rank is None, verdicts[n].rank or 0, parts[n].file),
    )
    return CriticalPathResult(
        parts=tuple(parts[n] for n in order),
        ranks_of=tuple(verdicts[n].rank for n in order),
        # Once each: the ranks of one run directory share its remarks.
        remarks=tuple(
            dict.fromkeys(
                f"{parts[n].file}: {why}"
                for n in order
                for why in (*parts[n].incomplete, *verdicts[n].problems)
            )
        ),
    )
