"""What bounds each step: the chain through launches, streams, synchronisation and collectives."""

from typing import Annotated

import typer

from kansoku.app.trace import critical_path
from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import PathsArgument, ProcessesFlag, RankFlag, SchedulerFlag, progress_bar


def command(
    paths: PathsArgument,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="One path over the whole file, not one a step.")
    ] = False,
    rank: RankFlag = None,
    processes: ProcessesFlag = None,
    scheduler: SchedulerFlag = None,
) -> None:
    """Show what bounds each step, through launches, streams, synchronisation, collectives."""
    with progress_bar("reading traces") as progress:
        result = critical_path(
            paths,
            steps=not whole,
            ranks=rank or (),
            processes=processes,
            scheduler=scheduler,
            progress=progress,
        )
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
