"""Record a full profiler trace of a running, unchanged job from outside."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag, SlurmJobFlag
from kansoku.cli._output import emit


def command(
    pids: Annotated[
        list[int] | None,
        typer.Argument(metavar="PID…", help="Processes of the job, or its launcher."),
    ] = None,
    slurm_job: SlurmJobFlag = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Record N optimizer steps.")
    ] = None,
    duration_ms: Annotated[
        int | None,
        typer.Option("--duration-ms", min=1, metavar="MS", help="Record MS ms (default 500)."),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option("--start", metavar="UNIX_S", help="Begin then; the same on many nodes."),
    ] = None,
    round_up: Annotated[
        int, typer.Option("--round-up", min=1, help="Steps begin at a multiple of this.")
    ] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the traces.")
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Record input shapes.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks.")] = False,
    modules: Annotated[bool, typer.Option("--modules", help="Record module names.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also where torch may crash (before 2.10).")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Give up after S seconds.")
    ] = 120.0,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Have all ranks on this node write a profiler trace at the same time.

    The job must have been started with KINETO_USE_DAEMON=1; nothing else changes for it.
    Exit 1 if a process left no trace.
    """
    from kansoku.app.trace_record import record
    from kansoku.trace.recording import Plan

    if steps is None and duration_ms is None:
        duration_ms = 500
    result = record(
        pids or [],
        slurm_job=slurm_job,
        plan=Plan(
            steps=steps,
            duration_ms=duration_ms,
            start_ns=None if start is None else int(start * 1e9),
            round_up=round_up,
            shapes=shapes,
            stacks=stacks,
            modules=modules,
        ),
        out=out,
        force=force,
        timeout_s=timeout_s,
        say=lambda line: print(line, file=sys.stderr),
    )
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
    if result.missing or not result.traces:
        raise typer.Exit(1)
