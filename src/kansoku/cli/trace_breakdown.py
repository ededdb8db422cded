"""Where the time goes: busy, idle, compute, communication, overlap; per rank, step and kernel.

Reads PyTorch profiler (Kineto) traces of one rank or many, whole or damaged.
"""

from kansoku.app.trace import breakdown
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
    """Where the time goes: busy, idle, compute, communication, overlap; per rank, step, kernel."""
    with progress_bar("reading traces") as progress:
        result = breakdown(
            paths,
            ranks=rank or (),
            processes=processes,
            scheduler=scheduler,
            progress=progress,
        )
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
