"""The list of jobs: its columns, its orders, what the filter looks at."""

from collections.abc import Callable, Sequence

from rich.text import Text

from kansoku.app.top import JobLine
from kansoku.tui._cells import LATE, number
from kansoku.view.plain import plain_line
from kansoku.view.units import in_time

__all__ = ["JOB_SORTS", "job_cells", "job_columns", "job_head", "kept_jobs"]

_NANOS_S = 1_000_000_000
JOB_SORTS: dict[str, Callable[[JobLine], tuple[float, float]]] = {
    "newest": lambda line: (-float(line.start_ns or 0), 0.0),
    "incidents": lambda line: (-float(line.incidents), -float(line.start_ns or 0)),
    "step time": lambda line: (-(line.step_ms or 0.0), 0.0),
    "lowest MFU": lambda line: (2.0 if line.mfu_ratio is None else line.mfu_ratio, 0.0),
    "nodes": lambda line: (-float(len(line.nodes)), 0.0),
}


def job_columns(*, narrow: bool) -> tuple[str, ...]:
    """Return the headings; 80 columns have room for eight."""
    if narrow:
        return ("job", "name", "nodes", "step", "ms", "MFU", "slowest", "incidents")
    return (
        "job", "name", "user", "state", "ran", "nodes", "GPUs", "ranks", "step", "ms a step",
        "MFU", "slowest rank", "incidents",
    )  # fmt: skip


def job_cells(line: JobLine, now_ns: int, *, narrow: bool) -> tuple[Text | str, ...]:
    """Return one row; marks carry the meaning where colour is missing."""
    name = Text(plain_line(line.name) or "–", overflow="ellipsis", no_wrap=True)
    name.truncate(12 if narrow else 24, overflow="ellipsis")
    late = Text("–") if line.late is None else Text(f"{line.late} ◀", LATE)
    trouble = Text(f"{line.incidents} !" if line.incidents else "–", "yellow")
    mfu = "–" if line.mfu_ratio is None else f"{line.mfu_ratio:.1%}"
    step = "–" if line.step is None else str(line.step)
    key = Text(plain_line(line.key))
    key.truncate(12 if narrow else 26, overflow="ellipsis")
    nodes, time = str(len(line.nodes) or "–"), number(line.step_ms, digits=0 if narrow else 1)
    if narrow:
        return (key, name, nodes, step, time, mfu, late, trouble)
    gpus, ranks = number(line.gpus), str(line.ranks or "–")
    return (
        key, name, line.user or "–", line.state, _ran(line.start_ns, now_ns), nodes, gpus, ranks,
        step, time, mfu, late, trouble,
    )  # fmt: skip


def job_head(jobs: Sequence[JobLine], sort: str) -> str:
    """Return the second line of the head."""
    late = sum(line.late is not None for line in jobs)
    trouble = sum(line.incidents > 0 for line in jobs)
    recorded = sum(line.run is not None for line in jobs)
    return " · ".join(
        (
            f"{len(jobs)} jobs, {recorded} recorded",
            f"{late} with a slow rank",
            f"{trouble} with incidents",
            f"sort: {sort}",
        )
    )


def kept_jobs(jobs: Sequence[JobLine], wanted: str, sort: str) -> list[JobLine]:
    """Return the jobs whose id, name, user or node holds the text, in order."""
    text = wanted.lower()
    kept = [
        line
        for line in jobs
        if any(text in one.lower() for one in (*line.ids, line.name, line.user, *line.nodes))
    ]
    return sorted(kept, key=JOB_SORTS[sort])


def _ran(start_ns: int | None, now_ns: int) -> str:
    if start_ns is None:
        return "–"
    return in_time(max(now_ns - start_ns, 0) // _NANOS_S) or "–"
