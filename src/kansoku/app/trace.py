"""Traces from anywhere: the Python functions behind ``kansoku trace …``.

Each returns a result with Polars DataFrames as attributes, ``to_json()`` and ``view()``.
"""

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
