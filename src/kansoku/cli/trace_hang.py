"""Name the ranks at fault for a hang: Flight Recorder dumps, NCCL RAS, logs, or a run."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import progress_bar


def command(
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMPS…", help="Files or folders.")],
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Say which ranks did not enter which collective, and whom the others wait for.

    Reads Flight Recorder dumps (pickle or JSON; the file name ends in the rank), RAS reports (text
    or JSON), NCCL debug logs and kansoku run folders. Exit 1 if a hang was found.
    """
    from kansoku.app.trace_hang import found, hang, hang_json, hang_view
    from kansoku.model import Verdict

    with progress_bar("reading dumps") as progress:
        report = hang(dumps, progress=progress)
    emit(hang_json(report), hang_view(report), as_json=as_json, html=html)
    if found(report) is Verdict.FOUND:
        raise typer.Exit(1)
