"""A small real HTTP server that streams completions, with a known first delay and pace."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


def endpoint_app(*, first_s: float, per_token_s: float, fail_every: int = 0) -> Starlette:
    """Return an app whose answers begin after ``first_s`` and go on at ``per_token_s``."""
    count = 0

    async def models(_request):
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def complete(request):
        nonlocal count
        count += 1
        if fail_every and count % fail_every == 0:
            return JSONResponse({"error": "busy"}, status_code=503)
        body = await request.json()

        async def stream():
            await asyncio.sleep(first_s)
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(per_token_s)
                yield f"data: {json.dumps({'choices': [{'delta': {'content': 'x'}}]})}\n\n"
            usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
            yield f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", complete, methods=["POST"]),
        ]
    )


@contextlib.contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve an app on a free port of the loopback; give its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(5)
