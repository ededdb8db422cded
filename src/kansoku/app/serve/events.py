"""Server-sent events: fresh rows of the store told to one reader until it leaves."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import polars as pl
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kansoku.errors import KansokuError
from kansoku.store.broadcast import Listener

__all__ = ["event_stream"]

_log = logging.getLogger(__name__)
_WAIT_S = 5.0
Tell = Callable[[str, pl.DataFrame], Awaitable[dict[str, Any]]]


def event_stream(
    request: Request, listener: Listener, event: str, tell: Tell, *, retry_ms: int
) -> StreamingResponse:
    """Answer with events of one name: ``tell`` turns a table's fresh rows into what is said.

    The listener is closed when the reader leaves or the store ends it. Where telling fails the
    stream ends: readers ask again by themselves, and get the status that belongs to the trouble.
    """

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield f"retry: {retry_ms}\n\n".encode()
            while not await request.is_disconnected():
                item = await run_in_threadpool(listener.get, _WAIT_S)
                if item is None:
                    if listener.closed:
                        return
                    yield b": still here\n\n"
                    continue
                data = orjson.dumps(await tell(*item))
                yield b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
        except KansokuError as error:
            _log.warning("a stream of %s ends: %s", event, error)
        finally:
            listener.close()

    return StreamingResponse(
        lines(), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )
