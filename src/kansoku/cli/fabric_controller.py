"""Run the fabric controller and analyser alone."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, StoreFlag


def command(
    cluster: ClusterFlag = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT|unix:PATH", help="Where agents report to.")
    ] = "127.0.0.1:8080",
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML with [settings] and [switches]; docs/fabric.md."),
    ] = None,
    store: StoreFlag = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KANSOKU_FABRIC_TOKEN", help="Agents must show it; needed off loopback."
        ),
    ] = None,
) -> None:
    """Keep the registry, hand out pinglists, judge every window.

    Part of `kansoku serve` too; alone it needs nothing but a cluster file. With --store each
    window's rows and findings are kept.
    """
    from kansoku.app.fabric import (
        Address,
        load_settings,
        make_service,
        save_outcomes,
        serve_controller,
    )
    from kansoku.errors import InputError

    if cluster is None:
        raise InputError("which cluster?", remedy="give --cluster FILE or a shipped name")
    policy, switches = load_settings(settings)
    address = Address.parse(listen)
    with save_outcomes(store) as saver:
        service = make_service(
            cluster, settings=policy, switches=switches, token=token, on_outcome=saver
        )
        saver.controller = service.controller
        text = f"fabric controller of {cluster} on {listen}"
        serve_controller(
            service, address, token=token, on_start=lambda: print(text, file=sys.stderr)
        )
