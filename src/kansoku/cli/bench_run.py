"""Run the reference pre-training over sizes and batches, observed, and sum it up."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SCRIPT FLAGS…]", help="For the training: --tp 2 --layers 8 …"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for runs and logs.")] = Path(
        "runs/bench"
    ),
    nodes: Annotated[str, typer.Option(help="Node counts: 1 or 1,2,4.")] = "1",
    ranks: Annotated[str, typer.Option(help="Ranks a node: 2 or 1,2,4.")] = "2",
    batch: Annotated[str, typer.Option(help="Global batches: 16 or 16,32.")] = "16",
    sbatch: Annotated[
        str | None, typer.Option(help="Submit through Slurm with these options: '-p gpu -t 60'.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Pre-train for real, on CPUs over Gloo or GPUs over NCCL. Exit 1 if a case did not succeed.

    Flags of the training follow --: --family gpt|llama, --layers, --hidden, --heads, --kv-heads,
    --seq, --vocab, --strategy ddp|fsdp, --tp, --pp, --sequence-parallel, --micro-batch, --steps,
    --target-loss, --eval-every, --checkpoint DIR, --checkpoint-every, --tokens FILE, --seed.
    """
    from kansoku.app.bench_run import PretrainCase, bench_run
    from kansoku.app.bench_scaling import scaling
    from kansoku.errors import InputError
    from kansoku.view import View

    def numbers(text: str, flag: str) -> list[int]:
        parts = text.split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise InputError(f"{flag} {text!r} is no list of numbers such as 1,2,4")
        return [int(part) for part in parts]

    cases = [
        PretrainCase(nodes=n, ranks_per_node=r, global_batch=b, arguments=tuple(arguments or ()))
        for n in numbers(nodes, "--nodes")
        for r in numbers(ranks, "--ranks")
        for b in numbers(batch, "--batch")
    ]
    result = bench_run(
        cases,
        out=out,
        sbatch=None if sbatch is None else [sbatch] if sbatch else [],
        say=lambda text: print(f"\r{text}", end="", file=sys.stderr),
    )
    view = result.view()
    if len({m.gpus for m in result.measurements()}) > 1:
        more = scaling(result.measurements()).view()
        view = View(title=view.title, blocks=[*view.blocks, *more.blocks])
    emit(result.to_json(), view, as_json=as_json, html=html)
    bad = any(r.score.status != "success" for r in result.results)
    raise typer.Exit(bad or bool(result.unfinished))
