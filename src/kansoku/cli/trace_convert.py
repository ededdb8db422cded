"""Convert traces and runs to Perfetto, OTLP, Kineto or Parquet."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.app.trace import convert
from kansoku.cli._flags import JsonFlag
from kansoku.cli._output import emit
from kansoku.cli._trace import PathsArgument, RankFlag, progress_bar


def command(
    paths: PathsArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="perfetto, otlp, kineto or parquet.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write; a folder for kineto with many ranks; .json makes OTLP JSON.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    rank: RankFlag = None,
) -> None:
    """Convert traces and runs to Perfetto, OTLP, Kineto or Parquet."""
    with progress_bar("converting") as progress:
        result = convert(paths, to=to, out=out, ranks=rank or (), progress=progress)
    emit(result.to_json(), result.view(), as_json=as_json)
