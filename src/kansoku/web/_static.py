"""Scripts, styles and pictures of the site, kept in memory: a page asks for a dozen at once."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

__all__ = ["BokehFiles", "static_answer", "static_version"]

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_YEAR = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    body: bytes
    packed: bytes
    kind: str
    tag: str


@cache
def _files() -> Mapping[str, _File]:
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            found[path.name] = _File(
                body=body,
                packed=gzip.compress(body, 6, mtime=0),
                kind=_TYPES[path.suffix],
                tag=f'"{hashlib.sha256(body).hexdigest()[:20]}"',
            )
    return found


@cache
def static_version() -> str:
    """Return a name for the whole set: part of the addresses, so that browsers may keep them."""
    digest = hashlib.sha256()
    for name, file in _files().items():
        digest.update(name.encode() + file.tag.encode())
    return digest.hexdigest()[:12]


async def static_answer(request: Request) -> Response:
    """Answer ``/static/VERSION/NAME`` for ever, ``/static/NAME`` until it changes."""
    file = _files().get(request.path_params["name"])
    if file is None:
        return Response("no such file", 404, media_type="text/plain")
    kept = request.path_params.get("version") == static_version()
    headers = {
        "cache-control": _YEAR if kept else "no-cache",
        "etag": file.tag,
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.packed, media_type=file.kind, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


class BokehFiles:
    """BokehJS as the installed package has it; found when first asked for."""

    def __init__(self) -> None:
        self._app: StaticFiles | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a file of the package."""
        if self._app is None:
            import bokeh

            self._app = _Kept(directory=Path(bokeh.__file__).parent / "server" / "static" / "js")
        await self._app(scope, receive, send)


class _Kept(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "public, max-age=86400"
        response.headers["x-content-type-options"] = "nosniff"
        return response
