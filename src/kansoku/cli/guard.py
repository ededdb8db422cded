"""Check this node before a job: GPUs, Xids, ECC, PCIe, NICs, mounts, clock, disk, memory."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, JsonFlag


def command(
    occasion: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="OCCASION",
            help="check, prolog (1.5 s), epilog (5 s) or health (20 s): the time it may take.",
        ),
    ] = "check",
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the node must have (TOML).")
    ] = None,
    cluster: ClusterFlag = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Another time limit.")
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Drain the node in Slurm where it is blocked.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Exit 1 with the reasons where the node is not fit. Fails open when it breaks itself."""
    from kansoku.app.guard import BUDGETS_S
    from kansoku.cli._guard import run
    from kansoku.errors import InputError

    if occasion not in BUDGETS_S:
        raise InputError(
            f"{occasion!r} is no occasion", where="--for", remedy=f"one of {', '.join(BUDGETS_S)}"
        )
    words = ["--for", occasion]
    words += ["--policy", str(policy)] if policy else []
    words += ["--cluster", cluster] if cluster else []
    words += ["--budget", str(budget)] if budget is not None else []
    words += ["--drain"] if drain else []
    words += ["--json"] if as_json else []
    raise typer.Exit(run(words))
