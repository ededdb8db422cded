"""Run a job under observation, with no change to its code; report at the end.

    kansoku run --out runs/a -- torchrun --nproc-per-node 4 train.py

The job's stdout, exit code and signal are its own. KANSOKU_DISABLE=1 runs it bare.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.app.run import RunOutcome, run
from kansoku.errors import InputError

__all__ = ["command"]

_LIVE_S, _QUIET_S = 1.0, 10.0
"""How often to say how the job does, in a terminal and where stderr is none."""


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- CMD…", help="The job's command line.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the run; default runs/RUN-ID."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Print the report at the end, on stderr.")
    ] = True,
) -> None:
    """Run a job under observation and print the report when it ends."""
    if arguments[0].startswith("-"):
        raise InputError(
            f"unknown option {arguments[0]}", remedy="options stand before --; see run --help"
        )
    live = _Live()
    outcome = run(arguments, out=out, say=live.say, say_every_s=live.every_s)
    live.clear()
    if outcome.message:
        print(f"kansoku: {outcome.message}", file=sys.stderr)
    else:
        if report:
            _report(outcome)
        print(f"kansoku: run {outcome.run} is in {outcome.out}", file=sys.stderr)
    if outcome.signal is not None:
        # Die as the job died, so that whoever waits for us sees the same; without a second core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if outcome.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(outcome.signal, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), outcome.signal)
    raise typer.Exit(outcome.exit_code)


command.context_settings = {  # type: ignore[attr-defined]
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


class _Live:
    """One line on stderr: rewritten in a terminal, now and then in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self.every_s = _LIVE_S if self._terminal else _QUIET_S

    def say(self, line: str) -> None:
        """Show the line."""
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(f"kansoku: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave a clean line."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _report(outcome: RunOutcome) -> None:
    """Draw the report on stderr; the job's stdout stays its own."""
    try:
        from rich.console import Console

        from kansoku.app.report import report
        from kansoku.cli._draw import draw
    except ImportError:
        return
    try:
        seen = report(outcome.out)
        if seen.run.processes:
            draw(seen.view(), Console(stderr=True, highlight=False))
        else:  # a page of unknowns helps nobody
            print(f"kansoku: no report: {'; '.join(seen.run.missing[:1])}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - whatever fails here, the job's exit code stands
        print(f"kansoku: no report: {error}", file=sys.stderr)
