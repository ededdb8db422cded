"""Live terminal view: ranks and phases, GPUs, power, NICs, incidents."""

from typing import Annotated

import typer


def command(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN or URL]", help="Run folder, store or server.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between pictures.")] = 1.0,
) -> None:
    """Watch a run or a fleet.

    Keys: s sort, / filter, enter look in, escape back, space pause, q quit.
    A server's jobs come first: enter leads into a job, its ranks, nodes and incidents.
    """
    from kansoku.app.top import top
    from kansoku.tui import TopApp

    source = top(target)
    try:
        source.snapshot()
        TopApp(source, every_s=every).run()
    finally:
        source.close()
