"""Show loss and RTT between ToRs or RNICs, down to the paths of a pair."""

from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    by: Annotated[str, typer.Option(help="tor or rnic.")] = "tor",
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --target: tuples and paths of a pair.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    controller: Annotated[
        str, typer.Option(metavar="URL", help="http://HOST:PORT or unix:/PATH.")
    ] = "http://127.0.0.1:8080",
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Show the matrix of the last window."""
    from kansoku.app.fabric import matrix, matrix_view
    from kansoku.errors import InputError

    if by not in {"tor", "rnic"}:
        raise InputError(f"--by {by!r} is neither tor nor rnic")
    if (source is None) != (target is None):
        raise InputError("--source and --target belong together")
    answer = matrix(controller, by=by, source=source, target=target)
    emit(answer, matrix_view(answer), as_json=as_json, html=html)
