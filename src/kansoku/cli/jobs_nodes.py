"""Node health and lemon candidates: which nodes fail more than their share."""

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    since: SinceFlag = None,
    until: UntilFlag = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Score every node with its evidence. Exit 1 if there are lemon candidates."""
    from kansoku.app.jobs import nodes, nodes_json, nodes_view

    answer = nodes(since=since, until=until, cluster=cluster, store=store)
    emit(nodes_json(answer), nodes_view(answer), as_json=as_json, html=html)
    if any(node.lemon for node in answer.nodes):
        raise typer.Exit(1)
