"""What waits for what: operations before operations, and operations that meet others.

Of a pipeline-parallel step as arXiv 2505.05713 models it: one compute stream, four point-to-point
streams and one data-parallel stream a worker; a send meets its receive; collectives over data
parallelism meet on all dp ranks; clipping meets on all workers.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kansoku.errors import InputError
from kansoku.trace.whatif.record import Node, Operations

__all__ = ["COMMUNICATION", "Program", "chain_program", "pipeline_program"]

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"
LAYER_NORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER, COLLECTION = "optimizer-clip-main-grad", "optimizer", "gc"
# Of runs of ours only.
DATA_WAIT, CHECKPOINT = "data-wait", "checkpoint"
# Per direction: the chunk that the peer works on relative to ours.
_PEER = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
_OPPOSITE = {
    "forward-send": "forward-recv",
    "forward-recv": "forward-send",
    "backward-send": "backward-recv",
    "backward-recv": "backward-send",
}
COMMUNICATION = frozenset({*_PEER, GATHER, SCATTER, SEPARATE, LAYER_NORM, EMBEDDING, CLIP})
"""Types whose ideal is the median, not the mean: their tail is waiting, not work."""
# Stamps of two streams of one device may differ by this much and still mean "at once".
_SAME_TIME_S = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Dependencies between nodes (indices into ``Operations.nodes``)."""

    before: tuple[tuple[int, ...], ...]
    """Per node, those that must have ended before it starts."""
    meetings: tuple[tuple[int, ...], ...]
    """Nodes that end together, once all have started."""
    across_dp: frozenset[int]
    """Nodes that meet their like on every data-parallel rank."""
    unmodelled: tuple[int, ...] = ()
    """Nodes whose place in the step is unknown; they are left out."""

    def __post_init__(self) -> None:
        if len({node for group in self.meetings for node in group}) != sum(map(len, self.meetings)):
            raise InputError("an operation takes part in two meetings")


@dataclass(slots=True)
class _Builder:
    nodes: Sequence[Node]
    before: dict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    meetings: list[list[int]] = field(default_factory=list)
    across: set[int] = field(default_factory=set)
    modelled: set[int] = field(default_factory=set)
    index: dict[tuple[str, int, int], int] = field(default_factory=dict)
    by_stage: dict[int, dict[str, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = {(n.kind, n.sequence, n.stage): i for i, n in enumerate(self.nodes)}
        order = sorted(
            range(len(self.nodes)),
            key=lambda i: (self.nodes[i].start_s, self.nodes[i].sequence, self.nodes[i].kind),
        )
        for i in order:
            kind = self.nodes[i].kind
            kinds = self.by_stage.setdefault(self.nodes[i].stage, defaultdict(list))
            kinds[kind].append(i)
            if kind in (FORWARD, BACKWARD, DATA_WAIT):
                kinds["stream"].append(i)
            if kind in (FORWARD, BACKWARD):
                kinds["compute"].append(i)
            elif kind in (GATHER, SCATTER):
                kinds["data-parallel"].append(i)

    def after(self, node: int | None, *earlier: int | None) -> None:
        if node is None:
            return
        self.modelled.add(node)
        for one in earlier:
            if one is not None:
                self.before[node][one] = None
                self.modelled.add(one)

    def chain(self, nodes: Sequence[int], *first: int | None) -> None:
        last: Sequence[int | None] = first
        for node in nodes:
            self.after(node, *last)
            last = (node,)

    def meet(self, *nodes: int | None, across_dp: bool = False) -> None:
        group = [node for node in nodes if node is not None]
        if group:
            self.meetings.append(group)
            self.modelled.update(group)
            if across_dp:
                self.across.update(group)

    def build(self) -> Program:
        left = set(range(len(self.nodes))) - self.modelled
        return Program(
            before=tuple(tuple(self.before.get(i, ())) for i in range(len(self.nodes))),
            meetings=tuple(tuple(group) for group in self.meetings),
            across_dp=frozenset(self.across),
            unmodelled=tuple(sorted(left)),
        )


def pipeline_program(operations: Operations, *, data_parallel: bool) -> Program:
    """Return the dependencies of a pipeline-parallel step.

    ``data_parallel`` says that gradients are shared, also where it is by sequence parallelism
    (dp_size × dsp_size > 1).
    """
    build = _Builder(operations.nodes)
    pairs: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for stage in range(operations.stages):
        if not build.by_stage.get(stage, {}).get("compute"):
            raise InputError(f"stage {stage} has no forward or backward operations")
        _match_transfers(build, stage, operations.stages, pairs)
    for group in pairs.values():
        if len(group) == 2:
            build.meet(*group)
        else:  # its peer was not recorded
            for node in group:
                build.meet(node)
    overlapped = any(node.kind == SEPARATE for node in operations.nodes)
    for stage in range(operations.stages):
        _streams(build, stage)
        if data_parallel:
            build.chain(build.by_stage[stage]["data-parallel"])
            _gathers(build, stage)
            if overlapped:
                _scatters(build, stage)
        _after_compute(
            build, stage, operations.stages, data_parallel=data_parallel, overlapped=overlapped
        )
    if data_parallel:
        for i, kind in enumerate(node.kind for node in operations.nodes):
            if kind in (GATHER, SCATTER, SEPARATE):
                build.meet(i, across_dp=True)
    last = operations.stages - 1
    ends = dict.fromkeys(
        (build.index.get((EMBEDDING, 0, 0)), build.index.get((EMBEDDING, 0, last)))
    )
    build.meet(*ends)
    clips = [build.index.get((CLIP, 0, stage)) for stage in range(operations.stages)]
    build.meet(*clips, across_dp=True)
    return build.build()


def _match_transfers(
    build: _Builder, stage: int, stages: int, pairs: dict[tuple[str, int, int], list[int]]
) -> None:
    """Tie each send and receive to the compute it serves and to its peer.

    Recorders also note transfers that were never launched: receives after the last compute, sends
    before the first one, and those beyond the model's first and last chunk. They meet nobody.
    """
    nodes, kinds = build.nodes, build.by_stage[stage]
    chunks = (max(node.chunk for node in nodes) + 1) * stages
    for kind, delta in _PEER.items():
        transfers = kinds.get(kind, [])
        compute = "forward-compute" if kind.startswith("forward") else "backward-compute"
        work = kinds.get(compute, [])
        receives = kind.endswith("recv")
        if not work:
            for node in transfers:
                build.meet(node)
            continue
        if receives:
            latest = max(nodes[i].start_s for i in work) + _SAME_TIME_S
            launched = [i for i in transfers if nodes[i].start_s <= latest]
        else:
            earliest = min(nodes[i].end_s for i in work) - _SAME_TIME_S
            launched = [i for i in transfers if nodes[i].end_s >= earliest]
        # Interleaved schedules may leave out the very first receive.
        sequence = 1 if receives and len(launched) + 1 == len(work) else 0
        real = 0
        for node in transfers:
            served = None
            if node in launched:
                served = build.index.get((compute, sequence, stage))
                sequence += 1
            if served is None:
                build.meet(node)
                continue
            if receives:
                build.after(served, node)
                build.after(node, build.index.get((compute, nodes[served].sequence - 1, stage)))
            else:
                build.after(node, served)
            if 0 <= nodes[served].model_chunk + delta < chunks:
                peer = (stage + delta) % stages
                mine, other = (kind, real, stage), (_OPPOSITE[kind], real, peer)
                pairs[min(mine, other)].append(node)
                real += 1
            else:
                build.meet(node)


def _streams(build: _Builder, stage: int) -> None:
    """Compute runs in order, and so does each kind of transfer."""
    kinds, nodes = build.by_stage[stage], build.nodes
    compute = kinds["compute"]
    build.chain(kinds["stream"])
    for kind in _PEER:
        build.chain(kinds.get(kind, []))
    first = next((i for i, node in enumerate(compute) if nodes[node].kind == BACKWARD), 0)
    if first >= 2:
        # Backward transfers are posted after the last but one forward of the warm-up.
        for kind in ("backward-recv", "backward-send"):
            if (node := build.index.get((kind, 0, stage))) is not None:
                build.after(node, compute[first - 2])


def _gathers(build: _Builder, stage: int) -> None:
    """Let the first forward of a chunk wait for the last gather of its parameters."""
    nodes, kinds = build.nodes, build.by_stage[stage]
    seen: set[int] = set()
    for gather in sorted(kinds.get(GATHER, []), key=lambda i: -nodes[i].sequence):
        chunk = nodes[gather].chunk
        if chunk in seen:
            continue
        seen.add(chunk)
        work = [i for i in kinds.get(FORWARD, []) if nodes[i].chunk == chunk]
        if work:
            build.after(min(work, key=lambda i: nodes[i].start_s), gather)


def _scatters(build: _Builder, stage: int) -> None:
    """Let the first reduce-scatter of a chunk wait for its last backward."""
    nodes, kinds = build.nodes, build.by_stage[stage]
    seen: set[int] = set()
    for scatter in sorted(kinds.get(SCATTER, []), key=lambda i: nodes[i].sequence):
        chunk = nodes[scatter].chunk
        if chunk in seen:
            continue
        seen.add(chunk)
        work = [i for i in kinds.get(BACKWARD, []) if nodes[i].chunk == chunk]
        if work:
            build.after(scatter, max(work, key=lambda i: nodes[i].end_s))


def _after_compute(
    build: _Builder, stage: int, stages: int, *, data_parallel: bool, overlapped: bool
) -> None:
    """Gradients are reduced, clipped and applied after the last compute."""
    nodes, kinds, index = build.nodes, build.by_stage[stage], build.index
    last = max(kinds["compute"], key=lambda i: nodes[i].end_s)
    collection = index.get((COLLECTION, 0, stage))
    build.after(collection, last)
    scatters = sorted(kinds.get(SCATTER, []), key=lambda i: nodes[i].sequence)
    tail = [index.get((LAYER_NORM, 0, stage))]
    if stage in (0, stages - 1):
        tail.append(index.get((EMBEDDING, 0, stage)))
    first = [last if collection is None else collection]
    if data_parallel and overlapped:
        first += scatters[-1:]
        tail.append(index.get((SEPARATE, 0, stage)))
    elif data_parallel:
        tail += scatters
    tail += [index.get((kind, 0, stage)) for kind in (CLIP, OPTIMIZER, CHECKPOINT)]
    build.chain([node for node in tail if node is not None], *first)


def chain_program(operations: Operations, *, across_dp: frozenset[str]) -> Program:
    """Return a program of nodes in order of sequence; types in ``across_dp`` meet all workers."""
    build = _Builder(operations.nodes)
    meeting: dict[tuple[str, int], list[int]] = defaultdict(list)
    for stage in range(operations.stages):
        rows = [i for i, node in enumerate(operations.nodes) if node.stage == stage]
        rows.sort(key=lambda i: operations.nodes[i].sequence)
        build.chain(rows)
        for i in rows:
            node = operations.nodes[i]
            if node.kind in across_dp:
                meeting[node.kind, node.sequence].append(i)
    for group in meeting.values():
        build.meet(*group, across_dp=True)
    return build.build()
