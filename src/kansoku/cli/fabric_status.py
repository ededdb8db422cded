"""Say whether it is the network, and if so which RNIC, link or switch."""

from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    controller: Annotated[
        str, typer.Option(metavar="URL", help="http://HOST:PORT or unix:/PATH.")
    ] = "http://127.0.0.1:8080",
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Show the verdict of the last window, open anomalies, and the SLA.

    Exit 1 when something is at fault.
    """
    from kansoku.app.fabric import status, status_view

    answer = status(controller)
    emit(answer, status_view(answer), as_json=as_json, html=html)
    if answer["anomalies"]:
        raise typer.Exit(1)
