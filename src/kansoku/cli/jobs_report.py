"""Outcomes, sizes, waits, utilisation and phases of the cluster's jobs."""

from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    since: SinceFlag = None,
    until: UntilFlag = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    top: Annotated[int, typer.Option(min=1, help="Users, accounts, partitions shown.")] = 20,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Say who used what and how it ended, by count and by GPU-time."""
    from kansoku.app.jobs import kept_quarantined, report, report_json, report_view

    result = report(since=since, until=until, cluster=cluster, store=store, top=top)
    answer = report_json(result, quarantined=kept_quarantined(store))
    emit(answer, report_view(result), as_json=as_json, html=html)
