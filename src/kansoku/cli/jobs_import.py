"""Import Slurm accounting: saved sacct outputs, XDMoD logs, node events, or a live Slurm."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, StoreFlag
from kansoku.cli._output import emit


def command(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE…")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask the live Slurm for what is new since last time.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            min=60, metavar="SECONDS", help="With --live: keep going, asking at most this often."
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="Zone of local times in files; default this machine's."),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Where the header does not show it.")
    ] = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Import saved outputs or a live Slurm; the same rows again change nothing.

    Exit 1 if rows were quarantined: file, row and reason are listed.
    """
    from kansoku.app.jobs import collect, import_jobs, import_json, import_view
    from kansoku.errors import InputError, PlatformError

    if every is not None:
        if not live:
            raise InputError("--every keeps a live import going", remedy="add --live")
        for answer in collect(every_s=every, store=store, cluster=cluster):
            if isinstance(answer, PlatformError):
                print(f"kansoku: {answer}; will try again", file=sys.stderr)
            else:
                emit(import_json(answer), import_view(answer), as_json=as_json, html=html)
        return
    result = import_jobs(
        files or [],
        live=live,
        store=store,
        cluster=cluster,
        timezone=timezone,
        delimiter=delimiter,
    )
    emit(import_json(result), import_view(result), as_json=as_json, html=html)
    if result.quarantined_count:
        raise typer.Exit(1)
