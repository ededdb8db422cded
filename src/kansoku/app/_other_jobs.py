"""Which other recorded jobs are on this node: their rings stand beside the job's own."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kansoku.app._processes import start_ticks
from kansoku.capture.payload.gpus import gpu_facts
from kansoku.model import ring
from kansoku.node.gpu_identity import gpu_of_rank
from kansoku.node.sharing import NODE

__all__ = ["OtherJobs"]

_MAX_RUNS = 64


class _Rank(NamedTuple):
    pid: int
    process_start: int
    device: str | None
    """None where no GPU is in use."""


class OtherJobs:
    """Counts the ranks of other jobs, by device: what a :class:`FastSampler` asks once a second.

    Another user's rings cannot be read: while a process of that user lives, there are some ranks
    on the node, and nobody knows how many. They may be on any GPU too, unless something gave this
    job its GPUs (Slurm, CUDA_VISIBLE_DEVICES): then those are its own.
    """

    def __init__(self, own: Path, *, environment: Mapping[str, str], proc: Path | None = None):
        """Look beside ``own``, the folder of the job's rings."""
        self._own = own
        self._gpus_are_given = bool(gpu_facts(environment))
        self._proc = proc or Path("/proc")
        self._known: dict[tuple[str, int], _Rank] = {}

    def __call__(self, uuids: Mapping[str, str]) -> dict[str, float | None]:
        """Return ranks by device; None: some, nobody knows how many."""
        counts: dict[str, float] = {}
        strangers: set[int] = set()
        known: dict[tuple[str, int], _Rank] = {}
        for folder in self._folders():
            try:
                files = sorted(folder.glob("*.ring"))
                if not files and not os.access(folder, os.R_OK | os.X_OK):
                    strangers.add(folder.stat().st_uid)
                for file in files:
                    self._count(file, counts, known, uuids)
            except PermissionError:
                strangers.add(folder.stat().st_uid)
            except OSError:
                continue
        self._known = known
        found: dict[str, float | None] = {**counts}
        if strangers & self._users():
            found[NODE] = None
            if not self._gpus_are_given:
                found |= dict.fromkeys(uuids.values(), None)
        if counts.get("gpu"):  # on one of them, nobody knows which
            found |= dict.fromkeys(uuids.values(), None)
        return found

    def _folders(self) -> list[Path]:
        try:
            beside = sorted(self._own.parent.iterdir())
        except OSError:
            return []
        return [p for p in beside if p != self._own and p.is_dir()][:_MAX_RUNS]

    def _count(
        self,
        file: Path,
        counts: dict[str, float],
        known: dict[tuple[str, int], _Rank],
        uuids: Mapping[str, str],
    ) -> None:
        key = (str(file), file.stat().st_ino)
        rank = self._known.get(key)
        if rank is None or rank.device is None:  # a device is known from the first update on
            rank = _read(file, uuids)
        if rank is None:
            return
        known[key] = rank
        if start_ticks(rank.pid, self._proc) != rank.process_start:
            return
        for device in filter(None, (NODE, rank.device)):
            counts[device] = counts.get(device, 0.0) + 1

    def _users(self) -> set[int]:
        found = set()
        for process in self._proc.iterdir():
            if process.name.isdecimal():
                try:
                    found.add(process.stat().st_uid)
                except OSError:
                    continue
        return found


def _read(file: Path, uuids: Mapping[str, str]) -> _Rank | None:
    try:
        with file.open("rb") as stream:
            buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = ring.read_header(buffer)
        facts = ring.read_facts(buffer, header)
    except (OSError, ValueError, ring.RingError):
        return None
    device, kind = None, facts.get("device")
    if isinstance(kind, str) and kind != "cpu":
        extra = facts.get("extra")
        said = {str(k): str(v) for k, v in extra.items()} if isinstance(extra, dict) else {}
        device, _ = gpu_of_rank(max(header.local_rank or 0, 0), said, uuids=uuids)
        device = device or "gpu"
    return _Rank(header.pid, header.process_start, device)
