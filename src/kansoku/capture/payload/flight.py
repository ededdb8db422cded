"""Collectives issued from C++ where no compiler is: out of torch's Flight Recorder, at the end.

It is on by default and keeps the newest 2,000 entries with group, sequence and shapes, on Gloo
without times: they are counted, flagged NO_TIMES. A dump costs 13–32 ms, so there is one, when the
process ends.
"""

from __future__ import annotations

import collections
import json
from typing import Any

from kansoku.capture.payload.recorder import RECORDER
from kansoku.model import ring

__all__ = ["SEEN", "join"]

_COLLECTIVE = ring.KIND_CODES["collective"]
SEEN: collections.deque[tuple[int, int]] = collections.deque(maxlen=8192)
"""Start and end (monotonic) of the collectives that were seen from Python."""
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8,
}  # fmt: skip


def join() -> None:
    """Write what Python did not see; called once, before the ring closes."""
    writer = RECORDER.writer
    if writer is None:
        return
    import torch

    c10d: Any = torch._C._distributed_c10d  # noqa: SLF001 - no public way to the recorder
    take = getattr(c10d, "_dump_fr_trace_json", None) or c10d._dump_nccl_trace_json  # noqa: SLF001
    dump = json.loads(take(includeCollectives=True, onlyActive=False))
    monotonic, unix = ring.read_header(writer.buffer).anchor
    steps = RECORDER.phases.starts()
    known = list(SEEN)
    for entry in dump.get("entries", ()):
        created = int(entry["time_created_ns"]) - unix + monotonic
        if any(start <= created <= end for start, end in known):
            continue
        name = str(entry.get("profiling_name", "")).rpartition(":")[2]
        size, dtype = _size(entry, name)
        group = entry.get("process_group") or entry.get("pg_name") or [""]
        label = str(group[0] if isinstance(group, (list, tuple)) else group)
        sequence = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", -1)
        template = ring.pack_template(
            _COLLECTIVE,
            flags=ring.FLAG_NO_TIMES,
            name=writer.intern(name),
            group=writer.intern(label),
            dtype=writer.intern(dtype),
            sequence=int(sequence),
            bytes_=size,
        )
        step = next((number for number, start in reversed(steps) if start <= created), -1)
        writer.close(writer.open(template, created, step, 0), created, created, -1)
        RECORDER.count(_COLLECTIVE, size)


def _size(entry: dict[str, Any], name: str) -> tuple[int, str]:
    """Return bytes and dtype; of a gather what a rank ends up with, as nccl-tests counts."""
    side = "output" if name.startswith("all_gather") else "input"
    sizes, types = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
    total = 0
    for shape, kind in zip(sizes, types):  # noqa: B905 - 3.9
        count = 1
        for length in shape:
            count *= int(length)
        total += count * _ELEMENT_BYTES.get(str(kind), 4)
    first = str(types[0]).lower() if types else ""
    return total, {"float": "float32", "half": "float16", "double": "float64"}.get(first, first)
