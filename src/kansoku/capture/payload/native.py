"""Build, load and feed the native recorder of collectives (``recorder.cpp``).

It is compiled against the job's own torch once (about 10 s), kept in the user's cache, and loaded
by ctypes. Without a compiler the Python fallback in ``groups`` sees what Python issues.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from kansoku.capture.payload import building
from kansoku.capture.payload.bootstrap import warn
from kansoku.capture.payload.recorder import RECORDER
from kansoku.model import ring

__all__ = ["Native", "build", "load"]

_LANE = 1
_SETTLE_NS = 1_000_000_000
"""How long a process may wait at its end for ends that are being told; none is told in a hang."""
_FALLBACK = "the newest 2,000 at most, Gloo's reduce-scatters as the all-reduces it does them by"
_DTYPES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "Float": "float32", "Double": "float64", "Bool": "bool",
    "BFloat16": "bfloat16", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def build(torch: Any) -> str:
    """Return the path of the recorder for this torch, compiling it if it is not there yet."""
    note = "kansoku: compiling the collective recorder for this torch, once"
    return building.against_torch(torch, "recorder.cpp", "recorder", note)


def load(torch: Any) -> Any:
    """Return the native recorder writing into this process's ring, None where it cannot be."""
    if os.environ.get("KANSOKU_NATIVE") == "0":
        RECORDER.miss(
            "the times of collectives issued from C++ (the native recorder is switched off): "
            f"counted from Flight Recorder, {_FALLBACK}"
        )
        return None
    try:
        return Native(torch, build(torch))
    except Exception as error:
        warn("no native recorder")
        reason = str(error).splitlines()[-1][:160] if str(error) else repr(error)
        RECORDER.miss(
            "the times of collectives issued from C++ and the end of asynchronous ones, counted "
            f"from Flight Recorder, {_FALLBACK}: the native recorder does not build here ({reason})"
        )
        return None


class Native:
    """The loaded recorder. It writes lane 1; this class tells it names and switches it."""

    def __init__(self, torch: Any, path: str):
        library = ctypes.CDLL(path)
        library.kansoku_op.restype = ctypes.c_char_p
        library.kansoku_op_name.restype = ctypes.c_char_p
        library.kansoku_dtype.restype = ctypes.c_char_p
        library.kansoku_ring.argtypes = [
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint16, ctypes.c_uint16,
        ]  # fmt: skip
        library.kansoku_group.argtypes = [ctypes.c_char_p, ctypes.c_uint16]
        library.kansoku_settle.argtypes = [ctypes.c_int64]
        library.kansoku_settle.restype = None
        library.kansoku_enable.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self._library = library
        self.brackets = library.kansoku_brackets
        self.backward_ended = library.kansoku_backward_ended
        writer = RECORDER.writer
        assert writer is not None  # noqa: S101 - the caller made the ring
        count = library.kansoku_op_count()
        names = (ctypes.c_uint16 * count)(
            *(writer.intern(library.kansoku_op_name(i).decode()) for i in range(count))
        )
        dtypes = (ctypes.c_uint16 * 64)()
        for number in range(64):
            text = library.kansoku_dtype(number).decode()
            if text:
                dtypes[number] = writer.intern(_DTYPES.get(text, text.lower()))
        devices = (ctypes.c_uint16 * 2)(writer.intern("cpu"), writer.intern("cuda"))
        lane = ring.read_header(writer.buffer).lanes[_LANE]
        self._buffer = (ctypes.c_char * len(writer.buffer)).from_buffer(writer.buffer)
        library.kansoku_ring(
            ctypes.addressof(self._buffer), _LANE, lane.offset, lane.capacity, names, dtypes,
            devices, writer.intern("wait_tensor"), writer.intern("DDP finalize backward"),
        )  # fmt: skip
        self._mask, self._wait = self._free(torch, count)
        if self._mask != (1 << count) - 1:
            RECORDER.miss("some collectives: torch has kernels of its own where ours would stand")
        self.enable(on=True)

    def _free(self, torch: Any, count: int) -> tuple[int, bool]:
        """Return which operators have no kernel on our key, so that ours replaces nothing."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - the only place told
        exists = {schema.name for schema in torch._C._jit_get_all_schemas()}  # noqa: SLF001

        def is_free(name: str) -> bool:
            return name in exists and not has(name, "BackendSelect")

        ops = [f"c10d::{self._library.kansoku_op(i).decode()}" for i in range(count)]
        mask = sum(1 << i for i, name in enumerate(ops) if is_free(name))
        return mask, is_free("_c10d_functional::wait_tensor")

    def add_group(self, name: str) -> None:
        """Tell the index of a process group's name."""
        if RECORDER.writer is not None:
            self._library.kansoku_group(name.encode(), RECORDER.writer.intern(name))

    def enable(self, *, on: bool) -> None:
        """Put the kernels in or take them out."""
        if not on:
            self._library.kansoku_disable()
        elif self._library.kansoku_enable(self._mask, int(self._wait)):
            RECORDER.miss("collectives issued from C++: torch refused the native recorder")

    def stop(self) -> None:
        """Take everything out, once the last ends were told; nothing is written any more."""
        self._library.kansoku_settle(_SETTLE_NS)
        self._library.kansoku_disable()
        self._library.kansoku_abandon()

    def abandon(self) -> None:
        """In a forked child: never write the parent's ring."""
        self._library.kansoku_abandon()
