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

_LIVE_S, _QUIET_S = 2.0, 10.0
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
    live, presses = _Live(), _Presses()
    outcome = run(
        arguments,
        out=out,
        base_environment=_callers_environment(),
        say=live.say,
        say_every_s=live.every_s,
        ended=presses.ignore,
    )
    live.clear()
    if outcome.message:
        _tell(f"kansoku: {outcome.message}")
    else:
        if report:
            _report(outcome, presses)
        if not (report and outcome.end_written):
            for sentence in outcome.missing:
                _tell(f"kansoku: {sentence}")
        _tell(f"kansoku: run {outcome.run} is in {outcome.out}")
    presses.end()
    if outcome.signal is not None:
        # Die as the job died, so that whoever waits for us sees the same; without a second core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if outcome.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(outcome.signal, signal.SIG_DFL)
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
            _tell(f"\r\x1b[K{line}", end="")
        else:
            _tell(f"kansoku: {line}")

    def clear(self) -> None:
        """Leave a clean line."""
        if self._terminal:
            _tell("\r\x1b[K", end="")


class _Presses:
    """Ctrl-C: ends us before the job starts; after the job's end it ends the report, no more."""

    def __init__(self) -> None:
        self._raises = True
        # Where it is ignored, as in the background of a script, it stays so: for the job as well.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)

    def _press(self, *_: object) -> None:
        if self._raises:
            self._raises = False  # the next one must not end what the first one asked for
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Go on whatever is pressed."""
        self._raises = False

    def end(self) -> None:
        """Ignore it for good: while Python ends, it would kill us instead."""
        if signal.getsignal(signal.SIGINT) == self._press:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def hear(self) -> None:
        """Raise KeyboardInterrupt when it is pressed, once."""
        self._raises = True


def _callers_environment() -> dict[str, str]:
    """Return what we were started with.

    Libraries add to ``os.environ`` as they are imported (polars: ``_RJEM_MALLOC_CONF``), and Python
    itself does in the C locale; the job gets none of that.
    """
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if name}


def _tell(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _report(outcome: RunOutcome, presses: _Presses) -> None:
    """Draw the report on stderr; the job's stdout stays its own."""
    try:
        presses.hear()
        try:
            _draw_report(outcome)
        finally:
            presses.ignore()
    except KeyboardInterrupt:
        return


def _draw_report(outcome: RunOutcome) -> None:
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
            _tell(f"kansoku: no report: {'; '.join(seen.run.missing[:3])}")
    except Exception as error:  # noqa: BLE001 - whatever fails here, the job's exit code stands
        _tell(f"kansoku: no report: {error}")
