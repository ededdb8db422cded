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
    import sys

    from kansoku.app.top import top
    from kansoku.errors import PlatformError
    from kansoku.tui import TopApp

    source = top(target)
    try:
        source.snapshot()
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            # Without keys nobody could leave it, and a pipe would fill with pictures.
            raise PlatformError(
                "kansoku top needs a terminal",
                remedy="in a script: kansoku report RUN --json",
            )
        TopApp(source, every_s=every).run()
    finally:
        source.close()
