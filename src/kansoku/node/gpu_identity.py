"""Which of a node's GPUs a rank uses, by what its environment said."""

from collections.abc import Mapping

__all__ = ["gpu_of_rank"]


def gpu_of_rank(
    local_rank: int,
    said: Mapping[str, str],
    *,
    uuids: Mapping[str, str],
    whole_node: bool = False,
) -> tuple[str | None, str | None]:
    """Return the GPU's device in the samples (``gpu3``), or None and why it is not known.

    ``said`` has ``CUDA_VISIBLE_DEVICES``, ``SLURM_STEP_GPUS``, ``SLURM_JOB_GPUS`` of the rank's
    environment, ``uuids`` the UUID of each device sampled. A rank takes the visible GPU of its
    local rank, or the only one. ``whole_node`` says that the samples were taken outside the job:
    where Slurm confines a job to its GPUs, CUDA counts those alone, from 0.
    """
    visible = said.get("CUDA_VISIBLE_DEVICES")
    allotted = _indices(said.get("SLURM_STEP_GPUS") or said.get("SLURM_JOB_GPUS") or "")
    if visible is None:
        if not whole_node or not allotted:
            return f"gpu{local_rank}", None
        entries = [str(number) for number in range(len(allotted))]
    else:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if len(entries) > 1 and local_rank >= len(entries):
        return None, f"local rank {local_rank} has none of the {len(entries)} GPUs visible to it"
    if not entries:
        return None, "CUDA_VISIBLE_DEVICES is empty"
    entry = entries[local_rank if len(entries) > 1 else 0]
    if entry.startswith("MIG-"):
        return None, "a MIG slice has no energy counter of its own"
    if entry.startswith("GPU-"):
        fits = sorted(device for uuid, device in uuids.items() if uuid.startswith(entry))
        found = fits[0] if len(fits) == 1 else None
        return found, None if found else f"{entry} is not among the GPUs sampled"
    if not entry.isdecimal():
        return None, f"CUDA_VISIBLE_DEVICES={visible} names no GPU"
    number = int(entry)
    return _on_node(number, allotted) if whole_node and allotted else (f"gpu{number}", None)


def _on_node(number: int, allotted: list[int]) -> tuple[str | None, str | None]:
    """Return the node's own number of a GPU that CUDA calls ``number`` inside a Slurm job.

    Confined, it counts the allotted GPUs; not confined, all of the node. Both may make sense.
    """
    readings = {allotted[number]} if number < len(allotted) else set[int]()
    if number in allotted:
        readings.add(number)
    if len(readings) > 1:
        among = ",".join(map(str, allotted))
        return None, f"GPU {number} of Slurm's {among} has two meanings (confined or not)"
    return f"gpu{readings.pop() if readings else number}", None


def _indices(text: str) -> list[int]:
    """Return the numbers of ``0-2,5``; empty where it is no such list."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()):
            return []
        found += range(int(low), min(int(high or low), int(low) + 255) + 1)
    return found
