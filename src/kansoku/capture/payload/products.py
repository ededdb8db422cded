"""The products of a forward as torch's dispatcher sees them: loads and asks ``flops.cpp``.

It is compiled against the job's own torch once (about 10 s) and kept in the user's cache. Without a
compiler ``module_rules`` counts instead.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

from kansoku.capture.payload import building
from kansoku.capture.payload.bootstrap import warn
from kansoku.capture.payload.recorder import RECORDER

__all__ = ["Products", "Seen", "build", "observe"]

_MISSING = "model FLOPs of products outside modules: counted from the modules, not the operators"


def build(torch: Any) -> str:
    """Return the path of the part for this torch, compiling it if it is not there yet."""
    note = "kansoku: compiling the FLOPs counter for this torch, once"
    return building.against_torch(torch, "flops.cpp", "flops", note)


class Seen:
    """What was seen of a forward so far."""

    __slots__ = ("attention", "attentions", "matrix", "matrixes", "traced")

    def __init__(self, values: Any):
        self.matrix, self.attention, self.matrixes, self.attentions, self.traced = values
        # FLOPs of products of matrices, convolutions and recurrent layers; FLOPs of attention and
        # other batched products; the number of each; operators that only found out shapes.


class Products:
    """Counts the products of the calling thread between ``begin`` and ``end``."""

    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        library.kansoku_flops_begin.argtypes = [ctypes.c_double]
        library.kansoku_flops_part.argtypes = [ctypes.c_void_p]
        library.kansoku_flops_part.restype = None
        library.kansoku_flops_read.restype = None
        library.kansoku_flops_end.restype = None
        self._library = library
        self._values = (ctypes.c_double * 5)()
        self.end = library.kansoku_flops_end

    def begin(self, share: float, parts: Any) -> bool:
        """Start, and say if it did; products count ``share`` of theirs, those on ``parts`` all."""
        if self._library.kansoku_flops_begin(share):
            return False
        for part in parts:
            self._library.kansoku_flops_part(part._cdata)  # noqa: SLF001 - the address below Python
        return True

    def read(self) -> Seen:
        """Return what was seen so far."""
        self._library.kansoku_flops_read(self._values)
        return Seen(self._values)


_products: Products | None = None
_tried = False


def observe() -> Products | None:
    """Return the compiled part, built and loaded at the first call; None where it cannot be."""
    global _products, _tried  # noqa: PLW0603 - once a process
    if _tried:
        return _products
    _tried = True
    try:
        if os.environ.get("KANSOKU_NATIVE") != "0":
            _products = Products(build(importlib.import_module("torch")))
    except Exception:
        warn("no counter of FLOPs by operators")
    if _products is None:
        RECORDER.miss(_MISSING)
    return _products
