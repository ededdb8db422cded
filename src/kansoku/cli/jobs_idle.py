"""Free nodes and GPUs now and to come, idle allocations, what pending jobs would find."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="At least this many nodes.")] = 1,
    since: SinceFlag = "24h",
    until: UntilFlag = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    promql: Annotated[
        str | None, typer.Option(metavar="URL", help="Power from a PromQL endpoint.")
    ] = None,
    query: Annotated[
        str | None, typer.Option(metavar="PROMQL", help="With --promql: this query instead.")
    ] = None,
    below: Annotated[
        float | None, typer.Option(metavar="WATTS", help="A GPU below this is idle; default 150.")
    ] = None,
    nodes_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Saved sinfo --json or scontrol show nodes."),
    ] = None,
    queue_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Saved squeue --json.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Say what is free, by Slurm and by power, so that jobs can be invited."""
    from kansoku.app.jobs import idle, idle_json, idle_view

    answer = idle(
        least=nodes,
        since=since,
        until=until,
        cluster=cluster,
        store=store,
        promql=promql,
        query=query,
        below=below,
        nodes_file=nodes_file,
        queue_file=queue_file,
    )
    emit(idle_json(answer), idle_view(answer), as_json=as_json, html=html)
