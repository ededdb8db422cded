"""Train on one machine, slow one rank down on purpose, and find it."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kansoku.app.demo import demo
from kansoku.cli._flags import JsonFlag
from kansoku.cli._output import emit


class SlowPhase(StrEnum):
    """What is slowed down."""

    FORWARD = "forward"
    DATA = "data"
    OPTIMIZER = "optimizer"


def command(
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="Where the page with plots goes.")
    ] = Path("report.html"),
    as_json: JsonFlag = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the run here.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank to slow; drawn at random.")
    ] = None,
    phase: Annotated[SlowPhase, typer.Option("--phase", help="What to slow.")] = SlowPhase.FORWARD,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Ranks to train with.")] = 4,
    steps: Annotated[int, typer.Option("--steps", min=20, help="Steps to train.")] = 60,
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="Another training script.")
    ] = None,
) -> None:
    """Train a small GPT, one rank made slow on purpose, and report it.

    Exit 0 only if the report named the slowed rank and no other.
    """
    if rank is not None and rank >= ranks:
        raise typer.BadParameter(f"{rank} is not one of {ranks} ranks", param_hint="--rank")
    print(f"training on {ranks} ranks, one of them slowed in {phase.value} …", file=sys.stderr)
    outcome = demo(
        out=out, rank=rank, phase=phase.value, ranks=ranks, steps=steps, script=script,
        say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    emit(outcome.report.to_json(), outcome.report.view(), as_json=as_json, html=html)
    verdict = "named it" if outcome.named else "did not name it"
    print(
        f"rank {outcome.rank} was slowed in {outcome.phase}; the report {verdict}. "
        f"The run is in {outcome.out}",
        file=sys.stderr,
    )
    if not outcome.named:
        raise typer.Exit(1)
