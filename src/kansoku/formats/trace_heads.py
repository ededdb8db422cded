"""Tell trace formats by a file's first bytes.

Apart from their readers, which load Polars: that takes longer than reading a small Kineto trace.
"""

__all__ = ["is_execution_trace", "is_inspector"]


def is_inspector(head: bytes) -> bool:
    """Say whether these are the first bytes of an NCCL Inspector file."""
    return b'"coll_perf"' in head or b'"p2p_perf"' in head


def is_execution_trace(head: bytes) -> bool:
    """Say whether these are the first bytes of a PyTorch execution trace."""
    return b'"nodes"' in head and b'"schema"' in head and b'"traceEvents"' not in head
