"""Report the microbursts in a store: ports, causes, probes."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Run folder: its time, its collectives."),
    ] = None,
    since: SinceFlag = None,
    until: UntilFlag = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NAME", help="One node.")] = None,
    port: Annotated[str | None, typer.Option("--port", metavar="NAME", help="One port.")] = None,
    store: StoreFlag = None,
    bursts: Annotated[
        bool, typer.Option("--bursts", help="List each burst in the JSON as well.")
    ] = False,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Say per port how many bursts there were, how long and high, and what caused them.

    Without RUN or --since: the last hour.
    """
    from kansoku.app.burst import report, report_json, report_view

    result = report(run, store=store, since=since, until=until, node=node, port=port)
    emit(report_json(result, with_bursts=bursts), report_view(result), as_json=as_json, html=html)
