"""Have the paths of one run probed while it runs."""

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of kansoku run.")],
    cluster: ClusterFlag = None,
    controller: Annotated[
        str, typer.Option(metavar="URL", help="http://HOST:PORT or unix:/PATH.")
    ] = "http://127.0.0.1:8080",
) -> None:
    """Trace a run's own paths until it ends, taken from its process groups.

    Service tracing pauses by itself when the run ends, or soon after this command does.
    """
    from kansoku.app.fabric import follow
    from kansoku.errors import InputError

    if cluster is None:
        raise InputError("which cluster?", remedy="give --cluster FILE or a shipped name")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(follow(run, controller, cluster, stop=stop, say=say))
