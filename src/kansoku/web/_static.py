"""Scripts, styles and pictures of the site, kept in memory: a page asks for them all at once."""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["bokeh_address", "bokeh_answer", "linked_scripts", "static_answer", "static_version"]

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_YEAR = "public, max-age=31536000, immutable"
_SCRIPTS = ("texts", "times", "stage", "columns", "heatmap", "timeline", "tables", "live", "site")
"""Modules in the order in which they need each other."""
_IMPORT = re.compile(r"^(?:import .*|export \{.*\});\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|async)", re.MULTILINE)


def linked_scripts(folder: Path = _FOLDER) -> str:
    """Return all modules as one: nine requests cost a browser more than the scripts themselves.

    Top-level names of the modules must differ; a test holds them to that.
    """
    texts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    body: bytes
    packed: bytes
    kind: str
    tag: str


def _file(body: bytes, suffix: str) -> _File:
    return _File(
        body=body,
        packed=gzip.compress(body, 6, mtime=0),
        kind=_TYPES[suffix],
        tag=f'"{hashlib.sha256(body).hexdigest()[:20]}"',
    )


@cache
def _files() -> Mapping[str, _File]:
    found = {
        path.name: _file(path.read_bytes(), path.suffix)
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES and path.suffix != ".js"
    }
    return found | {"site.js": _file(linked_scripts().encode(), ".js")}


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
    return _answer(request, file, kept=request.path_params.get("version") == static_version())


def _answer(request: Request, file: _File, *, kept: bool) -> Response:
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


# BokehJS as the installed package has it


@cache
def bokeh_address() -> str:
    """Return the address of BokehJS, with its version."""
    return f"/static/bokeh/{metadata.version('bokeh')}/bokeh.min.js"


@cache
def _bokeh() -> _File:
    # Found, not imported: the package takes longer to import than its script to send.
    path = metadata.distribution("bokeh").locate_file("bokeh/server/static/js/bokeh.min.js")
    return _file(Path(str(path)).read_bytes(), ".js")


async def bokeh_answer(request: Request) -> Response:
    """Answer with BokehJS; read and packed when first asked for."""
    kept = request.url.path == bokeh_address()
    return _answer(request, await run_in_threadpool(_bokeh), kept=kept)
