"""What changed between two traces, and whether it is more than chance.

A and B are files, folders or archives. Exit 1 when something changed significantly.
"""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.app.trace import compare
from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import ProcessesFlag, SchedulerFlag, progress_bar


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference trace or folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The trace or folder to judge.")],
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
    processes: ProcessesFlag = None,
    scheduler: SchedulerFlag = None,
) -> None:
    """Tell what changed between two traces, and whether more than chance (exit 1: yes)."""
    with progress_bar("reading traces") as progress:
        result = compare(a, b, processes=processes, scheduler=scheduler, progress=progress)
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
    if result.significant:
        raise typer.Exit(1)
