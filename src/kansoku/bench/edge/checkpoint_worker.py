"""One rank of the checkpoint benchmark; started by torchrun, rank 0 writes one JSON file.

Each rank holds its share of the bytes as tensors, like a sharded optimizer's state, writes it,
flushes it to the storage, and reads it back after the page cache was asked to forget it.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TENSORS = 8


def _state(nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    each = max(nbytes // _TENSORS // 4, 1)
    return {f"layer{i}": torch.randn(each, generator=generator) for i in range(_TENSORS)}


def _flush(folder: Path) -> None:
    """Wait until the storage has the files, then let the page cache forget them."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _write(method: str, folder: Path, rank: int, state: dict[str, torch.Tensor]) -> None:
    if method == "plain":
        torch.save(state, folder / f"rank_{rank}.pt")
        return
    import torch.distributed.checkpoint as dcp

    dcp.save({f"rank{rank}": state}, checkpoint_id=str(folder))


def _read(method: str, folder: Path, rank: int, like: dict[str, torch.Tensor]) -> dict[str, Any]:
    if method == "plain":
        loaded: dict[str, Any] = torch.load(folder / f"rank_{rank}.pt", weights_only=True)
        return loaded
    import torch.distributed.checkpoint as dcp

    state = {f"rank{rank}": {name: torch.empty_like(t) for name, t in like.items()}}
    dcp.load(state, checkpoint_id=str(folder))
    return state[f"rank{rank}"]


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    """Write, flush, read and compare, ``--repetitions`` times a method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--out", required=True)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = _state(settings.bytes // ranks, rank)
    held = sum(t.numel() * t.element_size() for t in state.values())
    rows = []
    for method in settings.methods.split(","):
        for repetition in range(settings.repetitions):
            folder = Path(settings.path) / f"kansoku-{method}-{os.environ['TORCHELASTIC_RUN_ID']}"
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            dist.barrier()
            begin = time.perf_counter()
            _write(method, folder, rank, state)
            stall = _slowest(time.perf_counter() - begin)
            _flush(folder)
            durable = _slowest(time.perf_counter() - begin)
            dist.barrier()
            begin = time.perf_counter()
            back = _read(method, folder, rank, state)
            read = _slowest(time.perf_counter() - begin)
            wrong = sum(not torch.equal(back[name], tensor) for name, tensor in state.items())
            rows.append(
                {"method": method, "repetition": repetition, "bytes": held * ranks,
                 "stall_s": stall, "durable_s": durable, "read_s": read, "wrong_tensors": wrong}
            )  # fmt: skip
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        Path(settings.out).write_text(
            json.dumps({"ranks": ranks, "torch": torch.__version__, "rows": rows}), encoding="utf-8"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
