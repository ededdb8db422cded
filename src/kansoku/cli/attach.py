"""Watch a job that is already running, from outside; report when it ends or you leave.

    kansoku attach 4711 4712          # or the launcher's pid: what is below it counts too
    kansoku attach --slurm-job 123    # on a node of the job

Needs root and Linux 6.6. The job is not stopped or changed: probes in the kernel note its
calls. Ctrl-C leaves without a trace.
"""

import signal
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from kansoku.app.attach import Attachment, attach
from kansoku.cli._flags import JsonFlag, SlurmJobFlag

__all__ = ["command"]


def command(
    pids: Annotated[
        list[int] | None, typer.Argument(metavar="PID…", help="Processes of the job.")
    ] = None,
    slurm_job: SlurmJobFlag = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the run; default runs/RUN-ID."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", help="Leave after so long.", min=0.0),
    ] = None,
    children: Annotated[
        bool, typer.Option("--children/--no-children", help="Watch what is below them as well.")
    ] = True,
    launches: Annotated[
        bool, typer.Option("--launches", help="Note every CUDA kernel launch, about 1 µs each.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Print the report at the end, on stderr.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Watch a running job by probes in the kernel; print the report at the end."""
    leaving: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: leaving.append(received))
    live = sys.stderr.isatty()
    outcome = attach(
        pids or [],
        slurm_job=slurm_job,
        out=out,
        duration_s=duration,
        children=children,
        launches=launches,
        until=lambda: bool(leaving),
        say=_say if live else None,
    )
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    shows = report and any(process["calls"] for process in outcome.processes)
    if as_json:
        print(orjson.dumps(outcome.to_json()).decode())
    elif shows:
        _report(outcome)
    if not as_json and not (shows and outcome.end_written):
        for sentence in outcome.missing:
            _tell(sentence)
    elif outcome.left:
        _tell(outcome.left)  # the report says it too, somewhere above
    _tell(f"run {outcome.run} is in {outcome.out} ({outcome.reason})")
    if outcome.left:
        raise typer.Exit(3)


def _tell(sentence: str) -> None:
    print(f"kansoku: {sentence}", file=sys.stderr)


def _say(line: str) -> None:
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _report(outcome: Attachment) -> None:
    """Draw the report on stderr."""
    from rich.console import Console

    from kansoku.app.report import report
    from kansoku.cli._draw import draw

    draw(report(outcome.out).view(), Console(stderr=True, highlight=False))
