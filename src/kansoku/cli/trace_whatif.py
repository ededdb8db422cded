"""How fast the job would be without stragglers, and which worker, stage or operation costs it."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import progress_bar


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH…",
            help="Folder with trace-*.parquet and meta-*.yaml, a run, or Kineto traces.",
        ),
    ],
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
    stages: Annotated[
        int | None,
        typer.Option(
            "--stages",
            min=1,
            metavar="N",
            help="Pipeline size of a run or of Kineto traces, if they do not tell.",
        ),
    ] = None,
) -> None:
    """Replay the job with ideal operation times: the slowdown, and whom to blame for it.

    Shares are of the loss (actual − ideal step time) that goes away with one worker, stage or
    operation type. Exit 1 if a culprit was found.
    """
    from kansoku.app.trace_whatif import whatif
    from kansoku.model import Verdict

    with progress_bar("replaying") as progress:
        result = whatif(paths, stages=stages, progress=progress)
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
    if result.verdict is Verdict.FOUND:
        raise typer.Exit(1)
