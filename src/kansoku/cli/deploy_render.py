"""Render collector, stores, Grafana, alerts, systemd and Slurm scripts from one cluster file."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import DryRunFlag, JsonFlag
from kansoku.cli._output import emit

__all__ = ["command"]


def command(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER.toml", help="Cluster file, or a shipped name.")
    ],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder; default ./deploy-NAME.")
    ] = None,
    collector_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Collector to write for: names before 0.144 were others."
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="The gateway's receivers have a certificate.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="The gateway feeds kansoku serve too.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(metavar="DIR", help="Where kansoku is installed on the nodes.")
    ] = "/opt/kansoku",
    dashboards: Annotated[
        bool, typer.Option(help="Dashboards need the grafana extra; leave them out without it.")
    ] = True,
    dry_run: DryRunFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write the configuration of a fleet; what the cluster file does not say is marked unknown."""
    from kansoku.app.deploy import DeployOptions, deploy_render

    options = DeployOptions(
        collector_version=collector_version,
        tls=tls,
        serve=serve,
        prefix=prefix,
        dashboards=dashboards,
    )
    answer, view = deploy_render(cluster, out, options=options, dry_run=dry_run)
    emit(answer, view, as_json=json)
