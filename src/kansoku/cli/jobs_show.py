"""One job: incarnations, what it used, its training report, incidents near it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, StoreFlag
from kansoku.cli._output import emit


def command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="12, 12_3 or 12+1.")],
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Where runs are recorded; default ./runs."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask sacct for this job instead of the history.")
    ] = False,
    write_comment: Annotated[
        bool,
        typer.Option("--write-comment", help="Write a summary to the job's AdminComment."),
    ] = False,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Show one job over its incarnations. Exit 1 if infrastructure ended it."""
    from kansoku.app.jobs import show, show_json, show_view, write_admin_comment

    answer = show(job, store=store, cluster=cluster, runs=runs or [Path("runs")], live=live)
    if write_comment:
        print(f"AdminComment: {write_admin_comment(answer)}", file=sys.stderr)
    emit(show_json(answer), show_view(answer), as_json=as_json, html=html)
    if answer.infrastructure:
        raise typer.Exit(1)
