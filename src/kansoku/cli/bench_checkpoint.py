"""Measure checkpoint storage: bandwidth, the stall of a step, the work at risk."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    path: Annotated[Path, typer.Argument(help="Folder on the storage to measure.")],
    size: Annotated[str, typer.Option(help="Bytes of the whole checkpoint: 256m, 4g.")] = "256m",
    ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Local ranks that write together.")
    ] = 2,
    methods: Annotated[str, typer.Option(help="Of dcp,plain.")] = "dcp,plain",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    interval_s: Annotated[float, typer.Option(min=1, help="Seconds between checkpoints.")] = 1800,
    mttf_h: Annotated[
        float | None, typer.Option(min=0.001, help="Mean hours to failure, for the best interval.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Write and read checkpoints with torch.distributed.checkpoint and torch.save."""
    from kansoku.app.bench_checkpoint import bench_checkpoint
    from kansoku.app.bench_collectives import parse_size

    report = bench_checkpoint(
        path,
        nbytes=parse_size(size),
        ranks=ranks,
        methods=methods.split(","),
        repetitions=repetitions,
        interval_s=interval_s,
        mttf_s=None if mttf_h is None else mttf_h * 3600,
    )
    emit(report.to_json(), report.view(), as_json=as_json, html=html)
    raise typer.Exit(any(method.wrong_tensors for method in report.methods))
