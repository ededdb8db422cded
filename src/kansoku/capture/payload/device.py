"""Device time of phases by CUDA events, read later without waiting. Not yet run on a GPU."""

from __future__ import annotations

import sys
from typing import Any

from kansoku.capture.payload.recorder import RECORDER

__all__ = ["begins", "collect", "ends"]

_MAX_PENDING = 4096
_pool: list[Any] = []
_open: dict[int, Any] = {}
_pending: list[tuple[int, Any, Any]] = []


def _cuda() -> Any:
    """Return torch.cuda where this process uses a GPU and no graph is being captured."""
    cuda: Any = sys.modules.get("torch.cuda")
    # The attribute, not is_initialized(): that asks about forks too, 25 µs a call.
    if (
        cuda is None
        or not getattr(cuda, "_initialized", False)
        or cuda.is_current_stream_capturing()
    ):
        return None
    return cuda


def _event(cuda: Any) -> Any:
    event = _pool.pop() if _pool else cuda.Event(enable_timing=True)
    event.record()
    return event


def begins(span: int) -> None:
    """Record an event at the start of a phase."""
    if span:
        cuda = _cuda()
        if cuda is not None and len(_pending) < _MAX_PENDING:
            _open[span] = _event(cuda)


def ends(span: int) -> None:
    """Record an event at the end of a phase."""
    started = _open.pop(span, None)
    if started is not None:
        cuda = _cuda()
        if cuda is not None:
            _pending.append((span, started, _event(cuda)))


def collect() -> None:
    """Write the device time of phases whose events have passed; never wait."""
    if not _pending:
        return
    writer = RECORDER.writer
    while _pending and writer is not None and _pending[0][2].query():
        span, started, ended = _pending.pop(0)
        writer.set_device_ns(span, round(started.elapsed_time(ended) * 1e6))
        _pool.extend((started, ended))
