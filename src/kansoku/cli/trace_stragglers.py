"""Which rank the others wait for: arrival order and imposed wait at every matched collective.

Clocks are aligned by the ends of collectives. Exit 1 when a straggler is found.
"""

import typer

from kansoku.app.trace import stragglers
from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import PathsArgument, ProcessesFlag, RankFlag, SchedulerFlag, progress_bar


def command(
    paths: PathsArgument,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
    rank: RankFlag = None,
    processes: ProcessesFlag = None,
    scheduler: SchedulerFlag = None,
) -> None:
    """Which rank the others wait for, from traces of many ranks (exit 1: found one)."""
    with progress_bar("reading traces") as progress:
        result = stragglers(
            paths,
            ranks=rank or (),
            processes=processes,
            scheduler=scheduler,
            progress=progress,
        )
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
    if result.report.verdict == "found":
        raise typer.Exit(1)
