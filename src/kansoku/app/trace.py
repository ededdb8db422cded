"""Traces from anywhere: the Python functions behind ``kansoku trace …``.

Each returns a result with Polars DataFrames as attributes, ``to_json()`` and ``view()``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kansoku.app._trace_breakdown import BreakdownResult, breakdown
    from kansoku.app._trace_compare import CompareResult, compare
    from kansoku.app._trace_convert import ConvertResult, convert
    from kansoku.app._trace_path import CriticalPathResult, critical_path
    from kansoku.app._trace_stragglers import StragglersResult, stragglers

__all__ = [
    "BreakdownResult",
    "CompareResult",
    "ConvertResult",
    "CriticalPathResult",
    "StragglersResult",
    "breakdown",
    "compare",
    "convert",
    "critical_path",
    "stragglers",
]

_MODULES = {
    "BreakdownResult": "breakdown",
    "CompareResult": "compare",
    "ConvertResult": "convert",
    "CriticalPathResult": "path",
    "StragglersResult": "stragglers",
    "critical_path": "path",
}


def __getattr__(name: str) -> Any:
    """Load a function when it is used: one of them needs no other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"kansoku.app._trace_{_MODULES.get(name, name)}")
    return getattr(module, name)
