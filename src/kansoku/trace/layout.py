"""The parallel layout of a run, as its process groups show it.

A group's description (a mesh axis, or what the framework calls it) names its axis. Without one, a
group that only carried point-to-point traffic is a pipeline, and one that holds every rank is data
parallel. Two ranks play the same role when they are at the same position of their pipeline group:
stages differ by nature, replicas and tensor shards do not.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from kansoku.model.run import ProcessGroup, RunFacts

__all__ = ["Layout", "group_keys", "read_layout"]

# Words found in descriptions and mesh axis names of torch, Megatron, DeepSpeed, torchtitan.
_AXES: tuple[tuple[str, str], ...] = (
    ("dp", r"(^|[^a-z])(dp|data|ddp|fsdp|hsdp|replicate|dp_shard|dp_replicate|zero)([^a-z]|$)"),
    ("pp", r"(^|[^a-z])(pp|pipe|pipeline|pipelining|stage)([^a-z]|$)"),
    ("tp", r"(^|[^a-z])(tp|tensor|mp|model)([^a-z]|$)"),
    ("cp", r"(^|[^a-z])(cp|context|ulysses|sp|sequence)([^a-z]|$)"),
    ("ep", r"(^|[^a-z])(ep|expert|moe)([^a-z]|$)"),
)
_POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, and who plays the same role."""

    world: int
    dp: int
    tp: int
    pp: int
    other: Mapping[str, int] = field(default_factory=dict)
    """Further axes seen, such as ``cp`` or ``ep``."""
    stage: Mapping[int, int] = field(default_factory=dict)
    """Rank to pipeline stage; 0 where there is no pipeline."""
    pipelines: tuple[tuple[int, ...], ...] = ()
    """The ranks of each pipeline group, in stage order; empty where there is no pipeline."""
    notes: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Return how many copies of the model train side by side."""
        return self.dp

    def roles(self) -> dict[int, tuple[int, ...]]:
        """Return pipeline stage to its ranks, sorted."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank, stage in self.stage.items():
            found[stage].append(rank)
        return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(found.items())}

    def to_json(self) -> dict[str, int]:
        """Return axis to size."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, **self.other}


def _axis(group: ProcessGroup) -> str | None:
    text = f"{group.description or ''}".lower()
    if not text:
        return None
    for axis, pattern in _AXES:
        if re.search(pattern, text):
            return axis
    return None


def group_keys(facts: RunFacts) -> dict[tuple[int, str], str]:
    """Map ``(rank, group name)`` to a key unique in the run.

    Sub-groups of one mesh axis may share a name; then their members tell them apart. Where the
    members are not known, the name is the process's own and says nothing of other ranks' groups.
    """
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for rank in facts.ranks:
        for group in rank.groups:
            members[group.name].add(group.ranks)
    keys: dict[tuple[int, str], str] = {}
    for rank in facts.ranks:
        if rank.rank is None:
            continue
        for group in rank.groups:
            suffix = ""
            if not group.ranks:
                suffix = f" of rank {rank.rank}"
            elif len(members[group.name]) > 1:
                suffix = f"[{','.join(map(str, group.ranks))}]"
            keys[rank.rank, group.name] = group.name + suffix
    return keys


def read_layout(facts: RunFacts, spans: pl.DataFrame) -> Layout:
    """Return the layout seen in the process groups; sizes multiply to the world size."""
    ranks = sorted({rank.rank for rank in facts.ranks if rank.rank is not None})
    ranks = ranks or sorted(spans["rank"].drop_nulls().unique().to_list())
    stated = [rank.world_size for rank in facts.ranks if rank.world_size]
    world = max([len(ranks), *stated])
    traffic = _traffic(spans)
    sizes: dict[str, int] = {}
    stage = dict.fromkeys(ranks, 0)
    notes: list[str] = []
    pipelines: set[tuple[int, ...]] = set()
    groups = {(g.name, g.ranks): g for rank in facts.ranks for g in rank.groups}
    for group in groups.values():
        axis = _axis(group)
        ops = traffic.get(group.name, set())
        if axis is None and ops - {"barrier"} and ops - {"barrier"} <= _POINT_TO_POINT:
            axis = "pp"
        if axis is None:
            continue
        sizes[axis] = max(sizes.get(axis, 1), len(group.ranks))
        if axis == "pp":
            pipelines.add(group.ranks)
            for position, rank in enumerate(group.ranks):
                stage[rank] = position
    for axis in ("tp", "pp", "cp", "ep"):
        # The group of all ranks gets the name of the only axis when a mesh has one.
        sizes.setdefault(axis, 1)
    known = sizes["tp"] * sizes["pp"] * sizes["cp"]
    dp = sizes.get("dp")
    if dp is None or dp * known != world:
        # Every rank outside the model-parallel axes is a replica or a shard of one.
        if known and world % known == 0:
            dp = world // known
        else:
            notes.append(f"the groups seen do not multiply to {world} ranks; dp is a guess")
            dp = dp or world
    other = {axis: sizes[axis] for axis in ("cp", "ep") if sizes[axis] > 1}
    return Layout(
        world=world,
        dp=dp,
        tp=sizes["tp"],
        pp=sizes["pp"],
        other=other,
        stage=stage,
        pipelines=tuple(sorted(pipelines)),
        notes=tuple(notes),
    )


def _traffic(spans: pl.DataFrame) -> dict[str, set[str]]:
    seen = (
        spans.lazy()
        .filter((pl.col("kind") == "collective") & pl.col("group").is_not_null())
        .group_by("group")
        .agg(pl.col("name").unique())
        .collect()
    )
    return {group: set(names) for group, names in seen.iter_rows()}
