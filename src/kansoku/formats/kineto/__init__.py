"""PyTorch profiler (Kineto) traces in Chrome JSON, of any age, from whole to badly damaged.

The modules ``spans`` (every slice as a table) and ``chrome`` (writing) stand apart because they
load Polars, which the processes that only read need not.
"""

from kansoku.formats.kineto._columns import NO_ID, CollectiveArguments
from kansoku.formats.kineto._events import Damage
from kansoku.formats.kineto._header import Metadata, rank_from_name
from kansoku.formats.kineto._read import read_trace
from kansoku.formats.kineto._source import Source, find_sources, inflated_bytes
from kansoku.formats.kineto._together import read_together
from kansoku.formats.kineto._trace import DEVICE_WORK, Detail, KinetoTrace

__all__ = [
    "DEVICE_WORK",
    "NO_ID",
    "CollectiveArguments",
    "Damage",
    "Detail",
    "KinetoTrace",
    "Metadata",
    "Source",
    "find_sources",
    "inflated_bytes",
    "rank_from_name",
    "read_together",
    "read_trace",
]
