"""Score MLPerf Training logs: time to train, olympic mean, convergence, MFU."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR…")],
    ruleset: Annotated[
        str | None,
        typer.Option(help="MLPerf Training round of the reference points; default the newest."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Accelerator, where system.json is absent.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of accelerators.")] = None,
    precision: Annotated[str, typer.Option(help="Peak that MFU divides by.")] = "bf16",
    convention: Annotated[str, typer.Option(help="FLOPs convention of MFU.")] = "full_attention",
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Score MLPerf Training logs of any submitter, a folder of result_*.txt at a time.

    Exit 1 if a folder's runs converge faster than the reference allows, or too few of them
    converged for a score.
    """
    from kansoku.app.bench_mfu import Hardware, mfu_of_run
    from kansoku.app.bench_score import score, score_json, score_view

    hardware = Hardware(gpu=gpu, gpus=gpus, precision=precision, convention=convention)
    results = score(paths, mfu=mfu_of_run(hardware), ruleset=ruleset)
    emit(score_json(results), score_view(results), as_json=as_json, html=html)
    if any(result.finding for result in results):
        raise typer.Exit(1)
