"""Memory of the fullest rank, part by part.

Bytes per parameter under mixed precision: weight 2, gradient 2 or 4, fp32 master weight and two
Adam moments 12 (Rajbhandari, arXiv 1910.02054; Megatron's distributed optimizer). Activations
after Korthikanti (arXiv 2205.05198, Table 2), generalised to grouped-query attention, gated MLPs,
context and expert parallelism. Stage 0 keeps the most micro-batches in flight, the last stage
holds the logits: the larger of the two counts.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.models import ModelShape
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.parameters import count_parameters
from kansoku.plan.stages import split_layers

__all__ = ["MemoryColumns", "activation_bytes_per_layer", "in_flight", "memory_columns"]

Array = NDArray[np.float64]

OPTIMIZER_BYTES = 12
"""fp32 master weight and two Adam moments."""
LOGIT_BYTES = 12
"""16-bit logits, their fp32 form, the fp32 softmax and the 16-bit gradient, alive together."""
CONTEXT_BYTES = 600 * 2**20
"""CUDA context, cuBLAS workspaces and loaded kernels; Megatron logs of the reference nodes show
0.5-0.7 GiB between the driver's and the allocator's figure."""
COMMUNICATOR_BYTES = 192 * 2**20
"""One NCCL communicator: 24 channels, two directions, 4 MiB buffers (NCCL_BUFFSIZE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Bytes of the fullest rank, one value a layout; the parts sum to ``total``."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    """Layer activations of every micro-batch in flight."""
    recompute_working: Array
    """One layer's activations while it is recomputed."""
    logits: Array
    communication: Array
    context: Array
    parameters: Array
    """Parameters of that rank; a count, not bytes."""
    layer_matrix_parameters: Array
    """Of them the matrices of the layers (12 h^2 a layer in a GPT); a count."""

    @property
    def total(self) -> Array:
        """Sum of the parts."""
        counts = {"parameters", "layer_matrix_parameters"}
        parts = [getattr(self, f.name) for f in fields(self) if f.name not in counts]
        return np.asarray(np.sum(parts, axis=0), dtype=np.float64)


def in_flight(columns: LayoutColumns, micro_batches: NDArray[np.int64]) -> Array:
    """Micro-batches whose activations stage 0 holds: pp, or pp + (pp-1)/vp when interleaved."""
    depth = columns.pp + np.where(columns.vp > 1, (columns.pp - 1) / columns.vp, 0)
    return np.minimum(micro_batches, depth)


def activation_bytes_per_layer(
    shape: ModelShape, training: Training, columns: LayoutColumns, *, moe: bool = False
) -> dict[str, Array]:
    """Return stored activations of one layer and micro-batch: ``none``, ``selective``, ``full``."""
    tokens = columns.micro_batch * training.seq / columns.cp
    shared = columns.tp if training.sequence_parallel else np.ones_like(columns.tp)
    # Inputs of two norms, of the QKV and of the first MLP product, two bytes each, and two masks.
    # FP8 keeps the inputs of products in one byte.
    kept_input = 1 if training.precision == "fp8" else 2
    split_by_sequence = (4 + 2 * kept_input + (2 if shape.dropout else 0)) * shape.hidden
    queries, values = shape.heads * shape.qk_dim, shape.heads * shape.v_dim
    kv_heads = shape.heads if shape.latent else shape.kv_heads
    keys = kv_heads * (shape.qk_dim + shape.v_dim)
    split_by_tensor: Array | float = 2.0 * (queries + keys) + kept_input * values
    if shape.latent:
        split_by_sequence += 2 * (shape.kv_lora_rank + shape.qk_rope_dim + shape.q_lora_rank)
    projections = 2 if shape.gated else 1
    if moe:
        width = shape.experts_per_token * shape.expert_ffn + shape.shared_expert_ffn
        # Tokens sent to the experts are kept as their input.
        routed = kept_input * shape.experts_per_token * shape.hidden
        split_by_sequence += routed
    else:
        width = shape.ffn
    split_by_tensor += (2 * projections + kept_input) * width
    kept = tokens * (split_by_sequence / shared + split_by_tensor / columns.tp)
    scores = tokens * 5 * shape.heads * training.seq / columns.tp
    softmax_sums = tokens * 4 * shape.heads / columns.tp
    core = scores if training.attention == "unfused" else softmax_sums
    selective_core = 0 * scores if training.attention == "unfused" else softmax_sums
    return {
        "none": kept + core,
        "selective": kept + selective_core,
        "full": tokens * 2 * shape.hidden / shared,
    }


def _layer_activations(
    shape: ModelShape, training: Training, columns: LayoutColumns
) -> tuple[Array, Array]:
    """Return the mean stored bytes of a layer and its working set under recomputation."""
    moe_share = shape.moe_layers / shape.layers
    kinds = [(1 - moe_share, False), (moe_share, True)]
    stored = np.zeros(len(columns))
    whole = np.zeros(len(columns))
    for share, moe in kinds:
        if share == 0:
            continue
        options = activation_bytes_per_layer(shape, training, columns, moe=moe)
        choices = [options["none"], options["selective"], options["full"]]
        stored += share * np.choose(columns.recompute, choices)
        whole = np.maximum(whole, options["none"])
    core = whole - activation_bytes_per_layer(shape, training, columns)["selective"]
    working = np.choose(columns.recompute, [0 * whole, np.maximum(core, 0), whole])
    return stored, working


def _local_parameters(
    shape: ModelShape, columns: LayoutColumns, layers: NDArray[np.int64], *, first: bool
) -> tuple[Array, Array, Array]:
    """Return (shared by dp x cp, experts, layer matrices) parameters of a first or last stage."""
    counts = count_parameters(shape)
    tp, moe_share = columns.tp, shape.moe_layers / shape.layers
    ffn = (1 - moe_share) * counts.dense_ffn + moe_share * (counts.shared_expert + counts.router)
    matrices = layers * (counts.attention + ffn) / tp
    experts = layers * moe_share * counts.experts * counts.expert / (tp * columns.ep)
    vectors = layers * counts.vectors
    alone = columns.pp == 1
    table = counts.embedding / tp
    output = np.where(alone, counts.output / tp, table)
    if first:
        ends = table + counts.positions + np.where(alone, output + counts.final_norm, 0)
    else:
        ends = output + counts.final_norm + np.where(alone, table + counts.positions, 0)
    return matrices + vectors + ends, experts, matrices + experts


def _states(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    layers: NDArray[np.int64],
    *,
    first: bool,
) -> dict[str, Array]:
    """Bytes of weights, gradients and optimizer states."""
    shared, experts, matrices = _local_parameters(shape, columns, layers, first=first)
    replicas = columns.dp * columns.cp
    expert_replicas = np.maximum(replicas // columns.ep, 1)

    def sharded(stage: int, size: float) -> Array:
        on = columns.zero >= stage
        whole = shared / np.where(on, replicas, 1) + experts / np.where(on, expert_replicas, 1)
        return np.asarray(size * whole, dtype=np.float64)

    return {
        # FP8 weights are kept with their transposes: the same two bytes.
        "weights": sharded(3, 2.0),
        "gradients": sharded(2, float(training.grad_bytes)),
        "optimizer": sharded(1, float(OPTIMIZER_BYTES)),
        "parameters": shared + experts,
        "layer_matrix_parameters": matrices,
    }


def _communication(
    shape: ModelShape, training: Training, columns: LayoutColumns, layers: NDArray[np.int64]
) -> Array:
    """Communicators' buffers, gathered sequence-parallel inputs, FSDP's two gathered layers."""
    groups = sum(
        (column > 1).astype(np.float64)
        for column in (columns.tp, columns.pp, columns.cp, columns.ep, columns.dp * columns.cp)
    )
    buffers = COMMUNICATOR_BYTES * np.asarray(groups)
    tokens = columns.micro_batch * training.seq / columns.cp
    gathered = np.where(columns.tp > 1, 2 * tokens * shape.hidden * 2, 0)
    pipeline = np.where(columns.pp > 1, 4 * tokens * shape.hidden * 2 / columns.tp, 0)
    counts = count_parameters(shape)
    biggest = max(counts.dense_layer, 0 if not shape.moe_layers else counts.moe_layer)
    fsdp = np.where(columns.zero >= 3, 2 * 2 * biggest / (columns.tp * columns.ep), 0)
    return np.asarray(buffers + gathered + pipeline + fsdp + 0 * layers, dtype=np.float64)


def memory_columns(shape: ModelShape, training: Training, columns: LayoutColumns) -> MemoryColumns:
    """Return the memory of the fullest rank for every layout."""
    stages = split_layers(shape.layers, columns)
    micro_batches = columns.micro_batches(training.global_batch)
    depth = in_flight(columns, micro_batches)
    per_layer, working = _layer_activations(shape, training, columns)
    tokens = columns.micro_batch * training.seq / columns.cp
    logits = tokens * shape.vocab * LOGIT_BYTES / columns.tp
    zero = np.zeros(len(columns))
    options = []
    # The last stage of an interleaved schedule warms up (vp - 1) x pp chunks, then holds one more.
    held_last = np.minimum(depth, ((columns.vp - 1) * columns.pp + 1) / columns.vp)
    for first, layers, held in ((True, stages.first, depth), (False, stages.last, held_last)):
        options.append(
            MemoryColumns(
                **_states(shape, training, columns, layers, first=first),
                activations=per_layer * layers * held,
                recompute_working=working,
                logits=np.where((columns.pp == 1) | (not first), logits, zero),
                communication=_communication(shape, training, columns, layers),
                context=zero + CONTEXT_BYTES,
            )
        )
    stage0, last = options
    fuller = stage0.total >= last.total
    return MemoryColumns(
        **{
            f.name: np.where(fuller, getattr(stage0, f.name), getattr(last, f.name))
            for f in fields(MemoryColumns)
        }
    )
