"""Step time: stages, pipeline, communication, optimizer, in seconds that sum to the step."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.models import ModelShape
from kansoku.plan.compute import Costs, Engine, Passes
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.memory import memory_columns
from kansoku.plan.network import Group, Network
from kansoku.plan.parameters import count_parameters
from kansoku.plan.stages import Stages, split_layers

__all__ = ["TimeColumns", "TrafficColumns", "step_time"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumns:
    """Seconds of a step by what they are spent on, one value a layout; they sum to ``total``."""

    gemm: Array
    attention: Array
    elementwise: Array
    gaps: Array
    """Between kernels."""
    recompute: Array
    """Forward work done again in the backward pass."""
    tp: Array
    """Exposed tensor- and sequence-parallel collectives."""
    cp: Array
    ep: Array
    pp: Array
    """Exposed transfers between stages."""
    dp: Array
    """Exposed gradient and weight collectives."""
    bubble: Array
    """Idle of a stage while the pipeline fills and drains, and stages wait for the fullest."""
    optimizer: Array

    @property
    def total(self) -> Array:
        """The step, seconds."""
        parts = [getattr(self, f.name) for f in fields(self)]
        return np.asarray(np.sum(parts, axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficColumns:
    """What one rank of the fullest stage sends in a step: bytes and seconds, hidden or not."""

    tp_bytes: Array
    cp_bytes: Array
    ep_bytes: Array
    pp_bytes: Array
    dp_bytes: Array
    tp_s: Array
    cp_s: Array
    ep_s: Array
    pp_s: Array
    dp_s: Array
    forward_s: Array
    """Forward compute of the mean stage, communication apart."""
    backward_s: Array
    """Backward compute of the mean stage, recomputation included."""
    groups: dict[str, Group]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One average layer and micro-batch."""

    passes: Passes
    tp_forward: Array
    tp_backward: Array
    cp_forward: Array
    cp_backward: Array
    ep_forward: Array
    ep_backward: Array
    recompute: Array
    tp_bytes: Array
    cp_bytes: Array
    ep_bytes: Array
    cp_s: Array

    @property
    def forward(self) -> Array:
        return self.passes.forward.total + self.tp_forward + self.cp_forward + self.ep_forward

    @property
    def backward(self) -> Array:
        return self.passes.backward.total + self.tp_backward + self.cp_backward + self.ep_backward


def _groups(columns: LayoutColumns, network: Network) -> dict[str, Group]:
    one = np.ones_like(columns.tp)
    replicas = columns.dp * columns.cp
    return {
        "tp": network.group(columns.tp, one),
        "cp": network.group(columns.cp, columns.tp),
        # Experts lie over context- and data-parallel ranks, nearest first.
        "ep": network.group(columns.ep, columns.tp),
        "dp": network.group(replicas, columns.tp),
        "expert_dp": network.group(np.maximum(replicas // columns.ep, 1), columns.tp * columns.ep),
        "pp": network.group(columns.pp, columns.tp * replicas),
    }


def _mean_passes(parts: list[tuple[float, Passes]]) -> Passes:
    (share, first), *rest = parts
    forward, backward = first.forward.times(share), first.backward.times(share)
    weights = first.weight_gradient_s * share
    for share, passes in rest:
        forward = forward + passes.forward.times(share)
        backward = backward + passes.backward.times(share)
        weights = weights + passes.weight_gradient_s * share
    return Passes(forward=forward, backward=backward, weight_gradient_s=weights)


def _layer(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    engine: Engine,
    network: Network,
    groups: dict[str, Group],
) -> _Layer:
    moe_share = shape.moe_layers / shape.layers
    parts = [(1 - moe_share, engine.layer(columns))] if moe_share < 1 else []
    if moe_share:
        parts.append((moe_share, engine.layer(columns, moe=True)))
    passes = _mean_passes(parts)
    tokens = columns.micro_batch * training.seq / columns.cp
    full = (columns.recompute == 2).astype(np.float64)
    on_tp = (columns.tp > 1).astype(np.float64)

    # Two all-gathers and two reduce-scatters each way (two all-reduces without sequence
    # parallelism: the same bytes); full recomputation repeats the forward ones.
    plane = tokens * shape.hidden * 2
    tp_forward = 4 * network.gather(groups["tp"], plane) * on_tp
    tp_again = full * tp_forward

    # Ring attention passes keys and values on cp - 1 times; backward also their gradients. It
    # runs beside the attention core, which hides it as far as the core is long.
    kv_heads = shape.heads if shape.latent else shape.kv_heads
    keys = tokens * kv_heads * (shape.qk_dim + shape.v_dim) * 2 / columns.tp
    ring = network.gather(groups["cp"], keys * columns.cp) * (columns.cp > 1)
    core_forward, core_backward = passes.forward.attention, passes.backward.attention
    cp_forward = np.maximum(ring - core_forward, 0)
    cp_backward = np.maximum(2 * ring - core_backward, 0) + full * cp_forward

    # Tokens go to their experts and back, forward and backward.
    routed = moe_share * tokens * shape.experts_per_token * shape.hidden * 2 / columns.tp
    exchange = 2 * network.exchange(groups["ep"], routed) * (moe_share > 0)
    again = full * passes.forward.total
    share = (columns.tp - 1) / columns.tp
    rounds = (columns.cp - 1) * keys
    return _Layer(
        passes=passes,
        tp_forward=tp_forward,
        tp_backward=tp_forward + tp_again,
        cp_forward=cp_forward,
        cp_backward=cp_backward,
        ep_forward=exchange,
        ep_backward=exchange * (1 + full),
        recompute=again + (columns.recompute == 1) * passes.forward.attention,
        tp_bytes=(8 + 4 * full) * plane * share,
        cp_bytes=(3 + full) * rounds,
        ep_bytes=(4 + 2 * full) * routed * (columns.ep - 1) / columns.ep,
        cp_s=(3 + full) * ring,
    )


def _gradients(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    network: Network,
    groups: dict[str, Group],
) -> tuple[Array, Array, Array, Array, Array]:
    """Return reduce-scatter and all-gather seconds, bytes sent, owned parameters, buckets."""
    memory = memory_columns(shape, training, columns)
    local = memory.parameters
    counts = count_parameters(shape)
    stage_layers = split_layers(shape.layers, columns).first
    expert = stage_layers * shape.moe_layers / shape.layers * counts.experts * counts.expert
    expert = expert / (columns.tp * columns.ep)
    shared = local - expert
    replicas = columns.dp * columns.cp
    # Megatron-core: buckets of 40 million parameters, or one million a rank, whichever is more.
    buckets = np.ceil(local / np.maximum(40e6, 1e6 * replicas))
    many = replicas > 1
    # An all-reduce brings gradients back, sharded states bring 16-bit weights.
    back = np.where(columns.zero >= 1, 2, training.grad_bytes)
    gathered, reduced = np.zeros(len(columns)), np.zeros(len(columns))
    sent = np.zeros(len(columns))
    for held, group in ((shared, groups["dp"]), (expert, groups["expert_dp"])):
        if not np.any(held):
            continue
        share = (group.size - 1) / group.size
        reduced += network.gather(group, held * training.grad_bytes, calls=buckets) * many
        gathered += network.gather(group, held * back, calls=buckets) * many
        sent += held * (training.grad_bytes + back) * share
    owned = np.where(
        columns.zero >= 1,
        shared / replicas + expert / np.maximum(replicas // columns.ep, 1),
        local,
    )
    return reduced, gathered, sent, owned, buckets


def _exposed_gradients(
    columns: LayoutColumns,
    micro_batches: Array,
    reduced: Array,
    gathered: Array,
    windows: tuple[Array, Array],
    *,
    buckets: Array,
    overlap: bool,
) -> Array:
    """Return what of the data-parallel collectives is not hidden behind compute.

    ZeRO 0 all-reduces once a step, behind the last backward. ZeRO 1 reduces there and gathers
    behind the first forward. ZeRO 2 reduces every micro-batch, ZeRO 3 also gathers for every
    forward and backward.
    """
    forward, backward = windows
    sharded = columns.zero >= 3
    rounds = np.where(columns.zero >= 2, micro_batches, 1.0)
    if not overlap:
        return rounds * reduced + np.where(sharded, 2 * micro_batches, 1.0) * gathered
    # The last bucket reduced and the first gathered have nothing to hide behind.
    start = (reduced + gathered) / buckets
    late = np.where(sharded | (columns.zero == 0), gathered, 0.0)
    ahead = np.where(columns.zero == 0, 0, np.where(sharded, micro_batches, 1.0))
    ahead = ahead * np.maximum(gathered - forward, 0)
    exposed = ahead + rounds * np.maximum(reduced + late - backward, 0) + start
    return np.asarray(exposed, dtype=np.float64)


def _bubble(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    layer: _Layer,
    end: Array,
    stages: Stages,
    m: Array,
) -> Array:
    """Return how long the mean stage is idle in a step of ``m`` micro-batches, in seconds.

    ``end`` is the time of embedding, head and loss for one micro-batch.
    """
    one = layer.forward + layer.backward
    last = stages.last * one + end
    most = np.maximum(np.maximum(stages.first, stages.middle) * one, last)
    fullest = np.where(columns.pp == 1, last, most)
    mean = (shape.layers * one + end) / columns.pp
    if training.schedule == "zero_bubble":
        # ZB-H1 (arXiv 2401.10241): the weights' gradients fill a part of the bubble.
        movable = layer.passes.weight_gradient_s * shape.layers / columns.pp
        idle = np.maximum(mean - 2 * movable, 0)
    else:
        idle = mean / columns.vp
    bubble: Array = (columns.pp - 1) * idle + m * (fullest - mean)
    return bubble


def step_time(
    shape: ModelShape, training: Training, columns: LayoutColumns, hardware: Hardware
) -> tuple[TimeColumns, TrafficColumns]:
    """Return the time of one step and its traffic for every layout.

    The layouts must be valid (:func:`kansoku.plan.search.reject`). Refuses hardware whose NIC
    rate or calibration is unknown.
    """
    calibration = hardware.need_calibration()
    largest = int((columns.tp * columns.pp * columns.dp * columns.cp).max(initial=1))
    network = Network(
        hardware=hardware, calibration=calibration, nic=hardware.need_network(largest)
    )
    engine = Engine(shape, training, hardware, calibration)
    groups = _groups(columns, network)
    layer = _layer(shape, training, columns, engine, network, groups)
    ends = engine.ends(columns)
    stages = split_layers(shape.layers, columns)
    m = columns.micro_batches(training.global_batch).astype(np.float64)
    overlap = calibration.overlap

    end = ends.forward.total + ends.backward.total
    bubble = _bubble(shape, training, columns, layer, end, stages, m)

    # Between stages: one activation forward and one gradient backward a chunk and micro-batch.
    plane = columns.micro_batch * training.seq / columns.cp * shape.hidden * 2 / columns.tp
    hop = network.send(groups["pp"], plane)
    transfers = 2 * m * columns.vp * (columns.pp > 1)
    hollow = layer.forward + layer.backward + end / shape.layers
    chunk = hollow * shape.layers / (columns.pp * columns.vp) / 2
    hidden = np.maximum(hop - chunk, 0) if overlap else hop
    steady = np.where(columns.vp > 1, hidden, hop)
    pp = transfers * steady + 2 * (columns.pp - 1) * hop

    reduced, gathered, dp_bytes, owned, buckets = _gradients(
        shape, training, columns, network, groups
    )
    layers_here = np.maximum(stages.first, 1)
    windows = (layers_here * layer.forward, layers_here * layer.backward)
    dp = _exposed_gradients(
        columns, m, reduced, gathered, windows, buckets=buckets, overlap=overlap
    )
    memory = memory_columns(shape, training, columns)
    # Seconds are those of the mean stage; what the fullest does beyond it is in the bubble.
    scale = m * shape.layers / columns.pp
    compute = _compute(layer, ends, scale, m / columns.pp)
    time = TimeColumns(
        **compute,
        tp=scale * (layer.tp_forward + layer.tp_backward),
        cp=scale * (layer.cp_forward + layer.cp_backward),
        ep=scale * (layer.ep_forward + layer.ep_backward),
        pp=pp,
        dp=dp,
        bubble=bubble,
        optimizer=engine.optimizer(memory.parameters, owned),
    )
    rounds = np.where(columns.zero >= 2, m, 1.0)
    traffic = TrafficColumns(
        tp_bytes=scale * layer.tp_bytes,
        cp_bytes=scale * layer.cp_bytes,
        ep_bytes=scale * layer.ep_bytes,
        pp_bytes=transfers * plane,
        dp_bytes=dp_bytes * rounds,
        tp_s=scale * (layer.tp_forward + layer.tp_backward),
        cp_s=scale * layer.cp_s,
        ep_s=scale * (layer.ep_forward + layer.ep_backward),
        pp_s=transfers * hop,
        dp_s=(reduced + gathered) * rounds,
        forward_s=scale * layer.passes.forward.total + m / columns.pp * ends.forward.total,
        backward_s=scale * layer.passes.backward.total + m / columns.pp * ends.backward.total,
        groups=groups,
    )
    return time, traffic


def _compute(layer: _Layer, ends: Passes, scale: Array, end_scale: Array) -> dict[str, Array]:
    """Split compute into its kinds, with the recomputed part apart."""
    work: Costs = layer.passes.forward + layer.passes.backward
    end = (ends.forward + ends.backward).times(end_scale)
    whole = work.times(scale) + end
    again = scale * layer.recompute
    # Recomputation repeats forward kinds in their own proportions.
    share = again / np.maximum(whole.total, 1e-30)
    return {
        "gemm": whole.gemm * (1 - share),
        "attention": whole.attention * (1 - share),
        "elementwise": whole.elementwise * (1 - share),
        "gaps": whole.gaps * (1 - share),
        "recompute": again,
    }
