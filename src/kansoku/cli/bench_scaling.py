"""Lay node counts side by side: speed-up, efficiency, and where the loss went."""

from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[FOLDER[:GPUS]…]", help="MLPerf logs by size.")
    ] = None,
    published: Annotated[
        str | None, typer.Option(metavar="NAME", help="A published result: sakuraone-gpt3.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Accelerator, where system.json is absent.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Peak that MFU divides by.")] = "bf16",
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Compare sizes of one job, from logs or from published figures."""
    from kansoku.app.bench_mfu import Hardware
    from kansoku.app.bench_scaling import published as published_result
    from kansoku.app.bench_scaling import published_names, scaling_of_folders
    from kansoku.errors import InputError

    if published is not None:
        result = published_result(published)
    elif folders:
        result = scaling_of_folders(folders, hardware=Hardware(gpu=gpu, precision=precision))
    else:
        raise InputError(
            "nothing to compare",
            remedy=f"name folders, or --published with one of {', '.join(published_names())}",
        )
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
