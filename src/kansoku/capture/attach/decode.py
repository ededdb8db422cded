"""What the arguments of a noted call mean: bytes, element types, names."""

from __future__ import annotations

import struct
from typing import Any

from kansoku.capture.attach.bpf import MAX_TENSORS, Event
from kansoku.capture.attach.probes import Probe
from kansoku.capture.attach.process import GroupFacts

__all__ = ["axis", "collective", "nccl", "size", "text"]

# c10::ScalarType in its order: name as in the recorder inside the process, bytes an element.
SCALAR_TYPES = (
    ("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8), ("float16", 2),
    ("float32", 4), ("float64", 8), ("complex32", 4), ("complex64", 8), ("complex128", 16),
    ("bool", 1), ("qint8", 1), ("quint8", 1), ("qint32", 4), ("bfloat16", 2), ("quint4x2", 1),
    ("quint2x4", 1), ("bits1x8", 1), ("bits2x4", 1), ("bits4x2", 1), ("bits8", 1), ("bits16", 2),
    ("float8_e5m2", 1), ("float8_e4m3fn", 1), ("float8_e5m2fnuz", 1), ("float8_e4m3fnuz", 1),
    ("uint16", 2), ("uint32", 4), ("uint64", 8),
)  # fmt: skip
# ncclDataType_t in its order.
NCCL_TYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)  # fmt: skip
_DEVICES = {0: "cpu", 1: "cuda"}
_TENSORS = struct.Struct("<QQQQQHbb4xQ")
_MAX_ELEMENTS = 1 << 48


def axis(description: str | None) -> str | None:
    """Return the mesh axis of torch's own descriptions such as ``mesh_tp``."""
    if description is None or description == "default_pg":
        return "default" if description else None
    return description.removeprefix("mesh_")


def size(value: int) -> int:
    """Return a byte count given as an argument; -1 where it cannot be one."""
    return value if value < _MAX_ELEMENTS else -1


def text(payload: bytes) -> str:
    """Return the noted beginning of a std::string."""
    length = int.from_bytes(payload[:8], "little")
    raw = payload[8 : 8 + min(length, len(payload) - 8)]
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def _elements(payload: bytes) -> tuple[int, str, int, str]:
    """Return element count, type name, bytes an element and device of the noted tensors.

    The words at the tensor's element count come in two layouts, 8 bytes apart: in the newer one the
    type and the device stand in the second word, which as a count would be absurdly large.
    """
    newer, older, tensors, lists, _, dtype, kind, _, third = _TENSORS.unpack_from(payload)
    (second,) = struct.unpack_from("<Q", payload, 40)
    if tensors > MAX_TENSORS or lists > 1 << 20:
        return -1, "", 0, ""
    if tensors == 0:
        return 0, "", 0, ""
    count = newer
    if second < _MAX_ELEMENTS:
        count, dtype, kind = older, third & 0xFFFF, third >> 16 & 0xFF
    count *= lists
    if count >= _MAX_ELEMENTS or dtype >= len(SCALAR_TYPES):
        return -1, "", 0, ""
    name, width = SCALAR_TYPES[dtype]
    return count, name, width, _DEVICES.get(kind, "")


def collective(probe: Probe, event: Event, group: GroupFacts | None) -> dict[str, Any]:
    """Return group, bytes, type, device and peer of a process group's call."""
    found: dict[str, Any] = {"group": group.name if group else "", "bytes": 0}
    if probe.shape != "plain":
        count, dtype, width, device = _elements(event.payload)
        factor = 1
        if probe.factor == "ranks":
            factor = (group.size if group and group.size else 0) or -1
        found["bytes"] = count * width * factor if count >= 0 and factor > 0 else -1
        found["dtype"], found["device"] = dtype, device
    if probe.peer >= 0:
        found["peer"] = event.arguments[probe.peer] & 0xFFFFFFFF
    return found


def nccl(probe: Probe, event: Event, ranks: int) -> dict[str, Any]:
    """Return what a call of NCCL's own interface says.

    The type follows the count. The size of the communicator is not among the arguments: the world's
    stands for it where a collective needs it.
    """
    count = size(event.arguments[probe.argument])
    dtype = event.arguments[probe.argument + 1] & 0xFFFFFFFF
    if count < 0 or dtype >= len(NCCL_TYPES):
        return {"bytes": -1, "device": "cuda"}
    name, width = NCCL_TYPES[dtype]
    factor = 1 if probe.factor == "one" else ranks
    found: dict[str, Any] = {
        "bytes": count * width * factor if factor > 0 else -1,
        "dtype": name,
        "device": "cuda",
    }
    if probe.peer >= 0:
        found["peer"] = event.arguments[probe.peer] & 0xFFFFFFFF
    return found
