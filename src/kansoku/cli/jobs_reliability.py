"""Failures by cause, MTTF by job size, ETTR, lost GPU-hours, best checkpoint interval."""

from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, SinceFlag, StoreFlag, UntilFlag
from kansoku.cli._output import emit


def command(
    since: SinceFlag = None,
    until: UntilFlag = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Would jobs of A nodes be steadier than of B?"),
    ] = None,
    write_time: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Writing one checkpoint blocks.")
    ] = 60.0,
    interval: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Between checkpoints now.")
    ] = 3600.0,
    restart_time: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="From start to first useful step.")
    ] = 300.0,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999)] = 0.9,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Say why jobs failed and how reliability falls with size."""
    from kansoku.app.jobs import (
        ReliabilityPolicy,
        parse_compare,
        reliability,
        reliability_json,
        reliability_view,
    )

    policy = ReliabilityPolicy(
        confidence=confidence,
        restart_s=restart_time,
        write_s=write_time,
        interval_s=interval,
        gpus_per_node=gpus_per_node,
    )
    answer = reliability(
        since=since,
        until=until,
        cluster=cluster,
        store=store,
        policy=policy,
        compare=parse_compare(compare),
    )
    emit(reliability_json(answer), reliability_view(answer), as_json=as_json, html=html)
