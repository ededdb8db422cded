"""Report a recorded run again: where steps go, who is slow, what every rank was in."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.app.report import report
from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit
from kansoku.model import Severity


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The --out folder of a run, or a ring file.")
    ],
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Report a recorded or running job.

    Exit 1 when a straggler, a hang, a dead rank or a lasting slowdown was found.
    """
    answer = report(run)
    emit(answer.to_json(), answer.view(), as_json=as_json, html=html)
    if any(finding.severity is not Severity.INFO for finding in answer.findings):
        raise typer.Exit(1)
