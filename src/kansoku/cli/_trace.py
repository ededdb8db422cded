"""Flags and progress that the trace commands share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["PathsArgument", "ProcessesFlag", "RankFlag", "SchedulerFlag", "progress_bar"]

PathsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="PATH…", help="Trace files (.json, .json.gz), folders, tar archives."),
]
RankFlag = Annotated[
    list[str] | None,
    typer.Option("--rank", metavar="FILE=N", help="Rank of a file that does not tell; repeatable."),
]
ProcessesFlag = Annotated[
    int | None,
    typer.Option("--processes", min=1, metavar="N", help="Processes; default one a core."),
]
SchedulerFlag = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="ADDRESS", help="Map files over a Dask scheduler."),
]


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (bytes done, bytes in all) that draws on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # here, not above: files and pipes see no bar (25 ms)
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update
