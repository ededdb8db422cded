"""Measure collectives over sizes: bandwidths, latency, fitted α and β."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Local ranks.")] = 2,
    sizes: Annotated[str, typer.Option(help="Sizes: 4k,1m or 4k-64m (doubling).")] = "4k-16m",
    operations: Annotated[
        str, typer.Option(help="Of all_reduce,all_gather,reduce_scatter,all_to_all,send_recv.")
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all,send_recv",
    repetitions: Annotated[int, typer.Option(min=3)] = 20,
    launcher: Annotated[
        str, typer.Option(help="Instead of torchrun, for several nodes: 'srun -N4 torchrun …'.")
    ] = "",
    links: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write α and β for kansoku plan --links.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Sweep collectives through torch.distributed: Gloo on CPUs, NCCL on GPUs."""
    from kansoku.app.bench_collectives import collectives, parse_sizes, write_links
    from kansoku.errors import InputError

    if links is not None and not links.parent.is_dir():
        raise InputError("no such folder", where=str(links.parent), remedy="another --links")
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise InputError(
            f"--launcher {launcher!r}: {error}", remedy="quote it as in a shell"
        ) from None
    result = collectives(
        ranks=ranks,
        sizes=parse_sizes(sizes),
        operations=operations.split(","),
        repetitions=repetitions,
        launcher=words,
    )
    # First what was measured, then the file: it may not be writable, or hold no fit.
    emit(result.to_json(), result.view(), as_json=as_json, html=html)
    if links is not None:
        write_links(result, links)
        print(f"wrote {links}", file=sys.stderr)
