"""Device time of phases by CUDA events, read later without waiting. Not yet run on a GPU."""

from __future__ import annotations

import sys
from typing import Any

from kansoku.capture.payload.recorder import RECORDER

__all__ = ["PENDING", "begins", "collect", "ends", "is_capturing", "is_used"]

_MAX_PENDING = 4096
_pool: list[Any] = []
_open: dict[int, Any] = {}
PENDING: list[tuple[int, Any, Any]] = []
"""Spans that have ended on the host, and their two events."""


def _cuda() -> Any:
    """Return torch.cuda where this process uses a GPU."""
    cuda: Any = sys.modules.get("torch.cuda")
    # The attribute, not is_initialized(): that asks about forks too, 25 µs a call.
    return cuda if getattr(cuda, "_initialized", False) else None


def is_used() -> bool:
    """Say whether this process uses a GPU."""
    return _cuda() is not None


def is_capturing() -> bool:
    """Say whether a CUDA graph is being captured here: asking an event would break the capture."""
    cuda = _cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


def _event(cuda: Any) -> Any:
    event = _pool.pop() if _pool else cuda.Event(enable_timing=True)
    event.record()
    return event


def begins(span: int) -> None:
    """Record an event at the start of a phase."""
    if span and len(PENDING) < _MAX_PENDING and not is_capturing():
        cuda = _cuda()
        if cuda is not None:
            _open[span] = _event(cuda)


def ends(span: int) -> None:
    """Record an event at the end of a phase."""
    started = _open.pop(span, None)
    if started is not None and not is_capturing():
        PENDING.append((span, started, _event(_cuda())))


def collect() -> None:
    """Write the device time of phases whose events have passed; never wait."""
    writer = RECORDER.writer
    if is_capturing():
        return
    while PENDING and writer is not None and PENDING[0][2].query():
        span, started, ended = PENDING.pop(0)
        writer.set_device_ns(span, round(started.elapsed_time(ended) * 1e6))
        _pool.extend((started, ended))
