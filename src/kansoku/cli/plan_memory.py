"""Memory of the fullest rank of a layout, part by part.

Without --gpu or --cluster nothing is compared with a GPU's memory. Exit 1 when it does not fit.
"""

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
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Memory of the fullest rank of a layout, part by part."""
    answer = plan.memory(f.request_of(locals()))
    emit(answer.to_json(), answer.view(), as_json=as_json, html=html)
    if answer.fits is False:
        raise typer.Exit(1)
