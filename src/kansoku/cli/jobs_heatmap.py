"""GPU power, utilisation, memory or NIC traffic of every node over time, with jobs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    quantity: Annotated[
        str, typer.Argument(metavar="[power|utilisation|memory|nic]", help="What to draw.")
    ] = "power",
    since: SinceFlag = "24h",
    until: UntilFlag = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    promql: Annotated[
        str | None, typer.Option(metavar="URL", help="A PromQL endpoint instead of the store.")
    ] = None,
    query: Annotated[
        str | None, typer.Option(metavar="PROMQL", help="With --promql: this query instead.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the picture as PNG.")
    ] = None,
    columns: Annotated[int, typer.Option(min=1, max=10000, help="Cells across.")] = 720,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Draw every node × GPU over time, jobs framed, in the terminal, as HTML or as PNG."""
    from kansoku.app.jobs import heatmap, heatmap_json, heatmap_png, heatmap_view

    matrix = heatmap(
        quantity,
        since=since,
        until=until,
        cluster=cluster,
        store=store,
        promql=promql,
        query=query,
        columns=columns,
    )
    if png is not None:
        heatmap_png(matrix, png)
        print(f"wrote {png}", file=sys.stderr)
    emit(heatmap_json(matrix), heatmap_view(matrix), as_json=as_json, html=html)
