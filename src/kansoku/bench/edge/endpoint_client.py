"""Send open-loop load to an endpoint that speaks the OpenAI protocol, streaming."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from kansoku.bench.endpoint import RequestResult

__all__ = ["EndpointSettings", "send_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Where and what to ask."""

    url: str
    """Base, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    prompts: Sequence[str]
    output_tokens: int
    chat: bool = True
    """``/chat/completions``, else ``/completions``."""
    token: str | None = None
    timeout_s: float = 120.0
    most_open: int = 1024
    """Requests in flight at one time; beyond it requests are sent late, and that is reported."""


def _body(settings: EndpointSettings, number: int) -> dict[str, Any]:
    prompt = settings.prompts[number % len(settings.prompts)]
    body: dict[str, Any] = {
        "model": settings.model,
        "max_tokens": settings.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if settings.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return body


def _tokens(event: Mapping[str, Any], before: int | None) -> int | None:
    """Return the completion tokens that an event counts, or what was known before."""
    told = (event.get("usage") or {}).get("completion_tokens")
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else before


def _piece(event: Mapping[str, Any]) -> bool:
    """Return whether a streamed event carries text."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


async def _ask(
    client: httpx.AsyncClient,
    settings: EndpointSettings,
    number: int,
    planned_s: float,
    zero: float,
) -> RequestResult:
    path = "/chat/completions" if settings.chat else "/completions"
    sent = time.perf_counter() - zero
    first: float | None = None
    last = sent
    pieces, usage = 0, None
    error = None
    try:
        async with client.stream("POST", path, json=_body(settings, number)) as answer:
            if answer.status_code != httpx.codes.OK:
                error = f"HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                if error is not None or not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    break
                event = orjson.loads(data)
                usage = _tokens(event, usage)
                if _piece(event):
                    last = time.perf_counter() - zero
                    first = last if first is None else first
                    pieces += 1
    except (httpx.HTTPError, httpx.StreamError, orjson.JSONDecodeError) as failure:
        error = type(failure).__name__
    except (AttributeError, TypeError):
        error = "an event that is not of the OpenAI protocol"
    if error is None and first is None:
        error = "no text"
    end = last if error is None else time.perf_counter() - zero
    return RequestResult(
        planned_s=planned_s,
        sent_s=sent,
        first_token_s=first,
        end_s=end,
        output_tokens=usage if usage is not None else pieces or None,
        error=error,
    )


async def _load(
    settings: EndpointSettings, due: Sequence[float]
) -> tuple[list[RequestResult], bool]:
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    limits = httpx.Limits(max_connections=settings.most_open, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=settings.url.rstrip("/"), headers=headers, timeout=settings.timeout_s,
        limits=limits, trust_env=False,
    ) as client:  # fmt: skip
        zero = time.perf_counter()
        tasks: list[asyncio.Task[RequestResult]] = []
        try:
            for number, planned in enumerate(due):
                pause = planned - (time.perf_counter() - zero)
                if pause > 0:
                    await asyncio.sleep(pause)
                tasks.append(asyncio.create_task(_ask(client, settings, number, planned, zero)))
            return list(await asyncio.gather(*tasks)), False
        except asyncio.CancelledError:
            # Ctrl-C: what has ended is measured, what is open was cut off by us and is not.
            ended = [t for t in tasks if t.done() and not t.cancelled() and not t.exception()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in ended], True


def send_load(settings: EndpointSettings, due: Sequence[float]) -> tuple[list[RequestResult], bool]:
    """Send a request at each due time (seconds from now) and wait for all to end.

    The second value tells that Ctrl-C ended the load early.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_load(settings, due))
    # In a notebook a loop runs already: ours gets a thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, _load(settings, due)).result()
