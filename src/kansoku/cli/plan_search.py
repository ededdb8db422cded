"""Rank every parallel layout of a model on a machine by predicted step time.

Tensor, pipeline, data, context and expert parallelism, interleaving, micro-batch, recomputation
and ZeRO are tried; a value given by flag is kept. Exit 1 when nothing fits.
"""

from typing import Annotated

import typer

from kansoku.app import plan
from kansoku.cli import _plan as f
from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag
from kansoku.cli._output import emit

__all__ = ["command"]


def command(
    *,
    model: f.ModelFlag = None,
    layers: f.LayersFlag = None,
    hidden: f.HiddenFlag = None,
    heads: f.HeadsFlag = None,
    kv_heads: f.KvHeadsFlag = None,
    head_dim: f.HeadDimFlag = None,
    ffn: f.FfnFlag = None,
    seq: f.SeqFlag = None,
    vocab: f.VocabFlag = None,
    gated: f.GatedFlag = None,
    tied: f.TiedFlag = None,
    experts: f.ExpertsFlag = None,
    experts_per_token: f.ExpertsPerTokenFlag = None,
    expert_ffn: f.ExpertFfnFlag = None,
    shared_expert_ffn: f.SharedExpertFfnFlag = None,
    cluster: ClusterFlag = None,
    gpu: f.GpuFlag = None,
    gpus: f.GpusFlag = None,
    global_batch: f.GlobalBatchFlag = None,
    micro_batch: f.MicroBatchFlag = None,
    tp: f.TpFlag = None,
    pp: f.PpFlag = None,
    dp: f.DpFlag = None,
    cp: f.CpFlag = None,
    ep: f.EpFlag = None,
    vp: f.VpFlag = None,
    recompute: f.RecomputeFlag = None,
    zero: f.ZeroFlag = None,
    precision: f.PrecisionFlag = None,
    attention: f.AttentionFlag = None,
    sequence_parallel: f.SequenceParallelFlag = True,
    schedule: f.ScheduleFlag = "1f1b",
    grad_bytes: f.GradBytesFlag = None,
    links: f.LinksFlag = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Layouts to show.")] = 10,
    batch_sweep: Annotated[
        bool, typer.Option("--batch-sweep", help="Also the best layout of other global batches.")
    ] = False,
    tokens: f.TokensFlag = None,
    evaluate_every: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Evaluate every so many steps.")
    ] = None,
    evaluation_sequences: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences of an evaluation.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Save every so many steps.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Rank every parallel layout of a model on a machine by predicted step time."""
    request = f.request_of(locals())
    cadence = plan.Cadence(
        evaluate_every=evaluate_every,
        evaluation_sequences=evaluation_sequences,
        checkpoint_every=checkpoint_every,
    )
    answer = plan.search(
        request, top=top, tokens=f.as_tokens(tokens), cadence=cadence, batch_sweep=batch_sweep
    )
    emit(answer.to_json(), answer.view(), as_json=as_json, html=html)
    if not answer.result.candidates:
        raise typer.Exit(1)
