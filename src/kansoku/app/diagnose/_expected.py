"""How fast a run's steps could be: its own model, ranks and devices, laid before the planner.

The record knows parameters, layers, width, FLOPs and tokens, not the sequence, vocabulary and
heads. Of a transformer of the usual form (12 · layers · width² weights in its blocks, embedding and
head beside them) these follow: attention adds 12 · layers · width · sequence FLOPs to the six of
every weight a token. What is left open (micro-batch, recomputation) the planner chooses: it is the
time that the layout can reach, so only steps far above it count.
"""

import math
from dataclasses import replace

from kansoku.app.plan import PlanRequest, explain
from kansoku.app.report import Report
from kansoku.catalog.accelerators import accelerator
from kansoku.diagnose.measures import MeasurePolicy, slower_than_planned
from kansoku.diagnose.observation import Observation
from kansoku.errors import KansokuError
from kansoku.model import RankFacts

__all__ = ["beyond_expected", "expected_step", "request_of_run"]

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16", "float8_e4m3fn": "fp8"}
"""Parameters in float32 on a GPU are trained by autocast, or by TF32 that no datasheet counts."""
_LEAST_SEQUENCE, _MOST_SEQUENCE = 128, 1 << 20
_LEAST_RATIO, _MOST_RATIO = 0.98, 3.0
"""Parameters over 12 · layers · width² of a transformer: GPT-2 has 1.46, Llama 2 7B 1.05."""


def _whole(facts: tuple[RankFacts, ...], name: str, replicas: int) -> float | None:
    """Return the sum of a fact over the ranks of one replica; None where one does not know it."""
    values = [getattr(rank, name) for rank in facts]
    return None if None in values else sum(values) / replicas


def _sequence(flops_per_token: float, weights: float, layers: int, hidden: int) -> int | None:
    """Return the power of two that the attention's share of the FLOPs speaks of."""
    length = (flops_per_token - 6 * weights) / (12 * layers * hidden)
    if not _LEAST_SEQUENCE / 2 <= length <= _MOST_SEQUENCE:
        return None
    return max(_LEAST_SEQUENCE, 1 << round(math.log2(length)))


def request_of_run(answer: Report) -> PlanRequest | str:
    """Return what to ask the planner about a run, or why that is not known."""
    facts, layout = answer.run.facts.ranks, answer.run.layout
    devices = {rank.device for rank in facts}
    if len(devices) != 1 or None in devices:
        return "the ranks' devices differ or are not known"
    try:
        device = accelerator(str(devices.pop()))
    except KansokuError as error:
        return str(error)
    if layout.dp * layout.tp * layout.pp != layout.world:
        return "the layout is more than data, tensor and pipeline parallel"
    parameters = _whole(facts, "parameters", layout.dp)
    layers = _whole(facts, "layers", layout.dp * layout.tp)
    hidden = {rank.hidden for rank in facts} - {None}
    tokens, flops = answer.throughput.tokens_per_step, answer.throughput.flops_per_step
    if None in (parameters, layers, tokens, flops) or not hidden:
        return "the model, its tokens or its FLOPs were not seen"
    return _fitted(
        PlanRequest(
            layers=round(layers or 0),
            hidden=max(width for width in hidden if width is not None),
            tied=False, gated=False, gpu=device.name, gpus=layout.world,
            tp=layout.tp, pp=layout.pp, dp=layout.dp,
            precision=_PRECISIONS.get(facts[0].extra.get("precision", "")),
        ),
        parameters or 0.0, tokens or 0.0, flops or 0.0,
    )  # fmt: skip


def _fitted(
    known: PlanRequest, parameters: float, tokens: float, flops: float
) -> PlanRequest | str:
    """Fill in sequence, vocabulary, heads and batch so that parameters and FLOPs come out."""
    layers, hidden = known.layers or 0, known.hidden or 0
    blocks = 12 * layers * hidden**2
    head = next((size for size in (128, 64) if hidden and hidden % size == 0), None)
    usual = bool(blocks) and _LEAST_RATIO <= parameters / blocks <= _MOST_RATIO
    if not usual or head is None or not tokens:
        return "the model is no transformer of the usual form"
    embedding = max((parameters - blocks) / 2, hidden)
    sequence = _sequence(flops / tokens, parameters - embedding, layers, hidden)
    if sequence is None or tokens % sequence:
        return "the sequence length does not follow from the FLOPs and tokens"
    return replace(
        known, seq=sequence, vocab=max(round(embedding / hidden), 1), heads=hidden // head,
        global_batch=round(tokens / sequence),
    )  # fmt: skip


def beyond_expected(
    answer: Report, policy: MeasurePolicy | None = None
) -> tuple[list[Observation], list[str]]:
    """Return that steps take far longer than they could; or why nothing was expected of them.

    Nothing is said of runs on CPUs, which no datasheet describes.
    """
    median_ns = answer.throughput.median_step_ns
    if median_ns is None or all((r.device or "cpu") == "cpu" for r in answer.run.facts.ranks):
        return [], []
    planned_s, of = expected_step(answer)
    if planned_s is None:
        return [], [f"no expected step time: {of}"]
    if median_ns / 1e9 < (policy or MeasurePolicy()).slower_than_possible * planned_s:
        return [], []
    return [slower_than_planned(median_ns / 1e9, planned_s, f"kansoku plan of {of}")], []


def expected_step(answer: Report) -> tuple[float | None, str]:
    """Return the seconds that a step could take, and of what; or None, and why not."""
    request = request_of_run(answer)
    if isinstance(request, str):
        return None, request
    try:
        planned = explain(request).candidate
        if not planned.fits:  # it ran: parameters were sharded, which the record does not say
            planned = explain(replace(request, zero=3)).candidate
    except KansokuError as error:
        return None, str(error)
    if not planned.fits:
        return None, "by the plan the layout does not fit in memory"
    return planned.step_s, (
        f"{request.layers} layers of {request.hidden}, sequences of {request.seq} as seen, "
        f"on {request.gpus} {request.gpu}"
    )
