"""How a model is split over ranks that compute with the same data: tensor parallelism.

An axis of a DTensor parameter's mesh splits the model where its ranks share their data: where they
are not those over which FSDP2 or DDP spreads the data. Expert parallelism that borrows ranks of
data parallelism is none, so.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Split", "find_split"]


class Split:
    """Over how many ranks the model is split, and which parameters are parts without saying so."""

    __slots__ = ("parts", "ranks")

    def __init__(self, ranks: int, parts: list[Any]):
        self.ranks = ranks
        """Ranks that compute with the same data, 1 without tensor parallelism."""
        self.parts = parts
        """Plain parameters that hold this rank's part of a weight (Megatron)."""

    @property
    def share(self) -> float:
        """What a product that each of them repeats counts on one."""
        return 1.0 / self.ranks


def find_split(root: Any) -> Split:
    """Return how a model is split; it has its parallel form when it first trains."""
    megatron = _megatron(root)
    if megatron is not None:
        return megatron
    distributed = [p for p in root.parameters() if hasattr(p, "device_mesh")]
    if not distributed:
        return Split(1, [])
    data = _data_ranks(root)
    if data is None:
        return Split(1, [])
    groups: dict[frozenset[int], int] = {}
    for parameter in distributed:
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate() or placement.is_partial() or mesh.size(axis) == 1:
                continue
            ranks = _ranks(mesh.get_group(axis))
            if len(ranks & data) <= 1:
                groups[ranks] = len(ranks)
    size = 1
    for ranks_of_axis in groups.values():
        size *= ranks_of_axis
    return Split(size, [])


def _ranks(group: Any) -> frozenset[int]:
    import torch.distributed as dist

    return frozenset(dist.get_process_group_ranks(group))


def _data_ranks(root: Any) -> frozenset[int] | None:
    """Return the ranks over which the data are spread; None where that is not told."""
    found: frozenset[int] = frozenset()
    is_sharded = False
    for module in root.modules():
        if type(module).__name__ == "DistributedDataParallel":
            found |= _ranks(module.process_group)
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        is_sharded = True
        state = get_state()
        several = getattr(state, "_fsdp_param_groups", None)
        one = getattr(state, "_fsdp_param_group", None) if several is None else None
        for group in several or [one]:
            info = getattr(group, "mesh_info", None)
            for name in ("shard_process_group", "replicate_process_group"):
                members = getattr(info, name, None)
                if members is not None:
                    found |= _ranks(members)
    return None if is_sharded and not found else found


def _megatron(root: Any) -> Split | None:
    """Return the split that Megatron's own layers made; None without them."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return None
    parts = [p for p in root.parameters() if getattr(p, "tensor_model_parallel", False)]
    size = int(state.get_tensor_model_parallel_world_size()) if parts else 1
    return Split(size, parts)
