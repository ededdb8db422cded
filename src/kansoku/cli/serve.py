"""Receive OTLP, keep it, answer queries and show pages, in one process."""

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kansoku.cli._flags import ClusterFlag, StoreFlag
from kansoku.errors import InputError

if TYPE_CHECKING:
    from kansoku.app.serve import ServeSettings
    from kansoku.store import Retention

__all__ = ["command"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _age(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise InputError(f"{text!r} is not an age such as 30d or 12h", where=flag)
    return int(match[1]) * _UNITS[match[2]]


def _size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})([KMGT]?)(iB|B)?", text)
    if match is None:
        raise InputError(f"{text!r} is not a size such as 200G", where=flag)
    return int(match[1]) * _SIZES[match[2]]


def _retention(age: str | None, size: str | None) -> "Retention":
    from kansoku.store import Retention

    return Retention(default_age_s=_age(age, "--retention"), max_bytes=_size(size, "--max-size"))


def command(
    store: StoreFlag = None,
    cluster: ClusterFlag = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the pages and the API; 0: any free.")
    ] = 8080,
    otlp_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OTLP over HTTP.")
    ] = 4318,
    grpc_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="Port of OTLP over gRPC; -1: none.")
    ] = 4317,
    principals: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may send and see what (TOML).")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="For HTTPS.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Whose certificates clients must have.")
    ] = None,
    fabric: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="[settings] and [switches] of the fabric controller."),
    ] = None,
    retention: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove rows older than this: 90d.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove the oldest hours beyond: 200G.")
    ] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Open incidents on what arrives.")
    ] = True,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help="Told of incidents.")] = None,
    alertmanager: Annotated[
        str | None, typer.Option(metavar="URL", help="Gets incidents as alerts (API v2).")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Gets incidents as OTLP log records (HTTP).")
    ] = None,
) -> None:
    """Receive OTLP, keep it, answer queries and show pages, in one process.

    With a cluster file that has a fabric it is the fabric's controller and analyser too.
    """
    from kansoku.app.serve import ServeSettings
    from kansoku.app.store import default_store
    from kansoku.app.watch import WatchSettings
    from kansoku.catalog import load_cluster
    from kansoku.store import StoreLimits

    if store is not None and store.startswith(("http://", "https://")):
        raise InputError(f"{store} is a server; serve needs a folder", where="--store")
    folder = Path(store) if store else default_store()
    if not diagnose and (webhook or alertmanager or otlp):
        raise InputError(
            "there are no incidents to tell of with --no-diagnose",
            where="--webhook, --alertmanager, --otlp",
        )
    watch = WatchSettings(
        webhook=webhook, alertmanager=alertmanager, otlp=otlp, collections=folder / "collections"
    )
    settings = ServeSettings(
        folder=folder,
        watch=watch if diagnose else None,
        host=host,
        port=port,
        otlp_port=otlp_port,
        grpc_port=None if grpc_port < 0 else grpc_port,
        principals=principals,
        certificate=certificate,
        key=key,
        client_authority=client_ca,
        cluster=load_cluster(cluster) if cluster else None,
        fabric=fabric,
        store=StoreLimits(retention=_retention(retention, max_size)),
    )
    _run(settings)


def _run(settings: "ServeSettings") -> None:
    """Serve until a signal; say where."""
    from kansoku.app.serve import Server

    server = Server(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.interrupt())
    server.start()
    grpc = "no gRPC" if server.grpc_port is None else f"gRPC {server.grpc_port}"
    print(
        f"kansoku serves {settings.folder}: {server.url} (pages and API), "
        f"OTLP HTTP {server.otlp_port}, {grpc}",
        file=sys.stderr,
    )
    for note in server.notes:
        print(note, file=sys.stderr)
    server.wait()
    server.stop()
