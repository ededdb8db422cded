"""The flags that commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ClusterFlag",
    "DryRunFlag",
    "HtmlFlag",
    "JsonFlag",
    "SinceFlag",
    "SlurmJobFlag",
    "StoreFlag",
    "UntilFlag",
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print versioned JSON on stdout.")]
HtmlFlag = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page."),
]
SinceFlag = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="TIME", help="From: 2026-01-31, 2026-01-31T12:00, 7d, 12h, 30m ago."
    ),
]
UntilFlag = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Until, in the same forms.")
]
ClusterFlag = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE|NAME", help="Cluster file, or a shipped name."),
]
StoreFlag = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="DIR|URL",
        envvar="KANSOKU_STORE",
        help="Store folder or server; default the XDG state folder.",
    ),
]
SlurmJobFlag = Annotated[
    str | None, typer.Option("--slurm-job", metavar="ID", help="A job of the live Slurm.")
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run/--no-dry-run", help="Say what would be done, do nothing.")
]
