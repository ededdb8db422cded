"""Process groups, their mesh axes, waits for collectives, and collectives where no compiler is."""

from __future__ import annotations

import functools
import os
import time
import weakref
from types import ModuleType
from typing import Any

from kansoku.capture.payload import device, flight, native
from kansoku.capture.payload.recorder import RECORDER
from kansoku.capture.payload.wrapping import replace
from kansoku.model import ring

__all__ = ["install", "name_axes"]

_COLLECTIVE = ring.KIND_CODES["collective"]
_WAIT = ring.KIND_CODES["collective_wait"]
_clock = time.monotonic_ns
_meshes: list[Any] = []
_loaded = False
_inside: list[str] = []
_sequences: dict[tuple[str, int, str], int] = {}


def install(torch: ModuleType) -> None:
    """Wrap the making of groups and meshes and the waiting for work."""
    distributed = torch.distributed
    if not distributed.is_available():
        return
    import torch.distributed.distributed_c10d as c10d

    replace(c10d, "_new_process_group_helper", _wrap_helper)
    replace(c10d.Work, "wait", _wrap_wait)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    replace(DeviceMesh, "__init__", _wrap_mesh)
    replace(DistributedDataParallel, "__init__", _wrap_ddp)
    if RECORDER.native is None and _loaded:
        _patch_python(torch)


def _wrap_helper(original: Any) -> Any:
    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        try:
            joins = RECORDER.start(joins=True)
            if joins:
                _load_native()
        except Exception:
            joins = False
            RECORDER.failed()
        result = original(*args, **kwargs)
        if joins:
            try:
                _note_group(args, kwargs, result)
            except Exception:
                RECORDER.failed()
        return result

    return helper


def _load_native() -> None:
    global _loaded  # noqa: PLW0603 - once a process
    if RECORDER.native is not None:
        return
    import torch

    RECORDER.native = native.load(torch)
    if RECORDER.native is None and not _loaded:
        _loaded = True
        _patch_python(torch)
    _loaded = True


def _note_group(args: Any, kwargs: Any, result: Any) -> None:
    size, rank, members = args[0], args[1], list(args[2])
    name = str(kwargs.get("group_name") or (args[5] if len(args) > 5 else ""))
    description = kwargs.get("group_desc")
    made = result[0] if isinstance(result, tuple) else result
    if not hasattr(made, "rank"):  # this rank is no member
        return
    if not members:  # the default group: ranks are global
        members = list(range(size))
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
        RECORDER.set_ranks(rank, int(local) if local and local.isdigit() else rank, size)
        RECORDER.facts["world_size"] = size
        description = description or "default"
    name = str(getattr(made, "group_name", "") or name)
    description = getattr(made, "group_desc", None) or description
    if RECORDER.native is not None:
        RECORDER.native.add_group(name)
    RECORDER.facts["groups"].append(
        {
            "name": name,
            "description": _axis(str(description)) if description else None,
            "ranks": [int(member) for member in members],
            "backend": str(args[3]) if len(args) > 3 and args[3] else None,
        }
    )
    RECORDER.write_facts()


def _axis(description: str) -> str:
    """Return the mesh axis of torch's own descriptions such as ``mesh_tp``."""
    return description.removeprefix("mesh_")


def _wrap_mesh(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the one wrapped
        original(self, *args, **kwargs)
        try:
            _meshes.append(weakref.ref(self))
        except Exception:
            RECORDER.failed()

    return __init__


def name_axes() -> None:
    """Give the groups of every mesh the names of its axes, also where torch reused one.

    Called once the model has trained: a mesh gets its groups some time after it was made.
    """
    known = {group["name"]: group for group in RECORDER.facts["groups"]}
    for reference in _meshes:
        mesh = reference()
        for number, axis in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
            try:
                found = known.get(str(mesh.get_group(number).group_name))
            except Exception:  # noqa: S112 - a mesh without groups names none
                continue
            if found is not None:
                found["description"] = str(axis)


def _wrap_ddp(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the one wrapped
        try:
            if RECORDER.native is not None:
                RECORDER.native.brackets(1)
        except Exception:
            RECORDER.failed()
        original(self, *args, **kwargs)

    return __init__


def _wrap_wait(original: Any) -> Any:
    recorder = RECORDER

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        span = 0
        try:
            # A collective that is through already makes nobody wait: nothing to record.
            if recorder.writer is not None and not (
                (recorder.on_device and device.is_capturing()) or self.is_completed()
            ):
                span = recorder.open(_WAIT, "wait")
        except Exception:
            recorder.failed()
        try:
            return original(self, *args, **kwargs)
        finally:
            if span:
                try:
                    recorder.close(span)
                except Exception:
                    recorder.failed()

    return wait


# -- without a compiler ----------------------------------------------------------------------------

# function -> (name in the ring, which argument holds the bytes, whether they are times the ranks)
_PYTHON = {
    "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "all_gather": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", -1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "gather": ("gather", 0),
    "scatter": ("scatter", 0),
    "isend": ("send", 0),
    "irecv": ("recv", 0),
}


def _nbytes(value: Any) -> tuple[int, str]:
    if isinstance(value, (list, tuple)):
        sizes = [_nbytes(item) for item in value]
        return sum(size for size, _ in sizes), sizes[0][1] if sizes else ""
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size()), str(value.dtype).replace("torch.", "")
    return 0, ""


def _patch_python(torch: ModuleType) -> None:
    import torch.distributed.distributed_c10d as c10d

    if flight.join not in RECORDER.before_end:
        RECORDER.before_end.append(flight.join)
    for function, (name, place) in _PYTHON.items():
        original = getattr(c10d, function, None)
        if original is None:
            continue
        wrapped = _wrap_collective(original, name, place)
        for owner in (c10d, torch.distributed):
            if getattr(owner, function, None) is original:
                replace(owner, function, functools.partial(_exchange, wrapped))


def _exchange(wrapped: Any, _: Any) -> Any:
    return wrapped


def _wrap_collective(original: Any, name: str, place: int) -> Any:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if _inside:  # torch's own send calls isend: one of them counts
            return original(*args, **kwargs)
        begun = None
        try:
            begun = _begin(args, kwargs, name, place)
        except Exception:
            RECORDER.failed()
        _inside.append(name)
        try:
            result = original(*args, **kwargs)
        finally:
            _inside.pop()
        if begun is not None:
            try:
                _end(begun, result)
            except Exception:
                RECORDER.failed()
        return result

    return collective


def _begin(args: Any, kwargs: Any, name: str, place: int) -> Any:
    writer = RECORDER.writer
    if writer is None:
        return None
    import torch.distributed.distributed_c10d as c10d

    group = kwargs.get("group") or next(
        (a for a in args if isinstance(a, c10d.ProcessGroup)), c10d.GroupMember.WORLD
    )
    label = str(getattr(group, "group_name", ""))
    tensors = list(args) + [
        v for k, v in kwargs.items() if "tensor" in k or k in ("input", "output")
    ]
    size, dtype = _nbytes(tensors[place]) if 0 <= place < len(tensors) else (0, "")
    peer = kwargs.get("dst", kwargs.get("src", args[1] if len(args) > 1 else -1))
    is_pair = name in ("send", "recv") and isinstance(peer, int)
    key = (label, peer if is_pair else -1, name if is_pair else "")
    sequence = _sequences.get(key, 0)
    _sequences[key] = sequence + 1
    template = ring.pack_template(
        _COLLECTIVE,
        name=writer.intern(name),
        group=writer.intern(label),
        dtype=writer.intern(dtype),
        thread=RECORDER.native_thread & 0xFFFFFFFF,
        sequence=sequence,
        bytes_=size,
        peer=peer + 1 if is_pair and peer >= 0 else 0,
    )
    start = _clock()
    return writer.open(template, start, RECORDER.phases.step, RECORDER.phases.parent), start, size


def _end(begun: Any, result: Any) -> None:
    span, start, size = begun
    writer = RECORDER.writer
    if writer is None:
        return
    if hasattr(result, "wait"):  # asynchronous: its end is not seen from Python
        writer.set_kind(span, _COLLECTIVE, ring.FLAG_ASYNC | ring.FLAG_NO_TIMES)
    end = _clock()
    writer.close(span, start, end, -1)
    flight.SEEN.append((start, end))
    RECORDER.count(_COLLECTIVE, size)
