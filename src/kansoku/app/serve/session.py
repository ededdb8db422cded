"""Browsers: a token kept in a cookie stands for the Authorization header of reading requests."""

from typing import Any

from starlette.datastructures import Headers

__all__ = ["COOKIE", "CookieSession"]

COOKIE = "kansoku_token"


class CookieSession:
    """Wrap the application; the cookie (HttpOnly, SameSite=Strict) counts for GET and HEAD only.

    Nothing that writes accepts it, so another site's form cannot act for the reader.
    """

    def __init__(self, app: Any) -> None:
        """Keep the application."""
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Add the header where a browser sent the cookie and no header of its own."""
        if scope["type"] == "http" and scope["method"] in {"GET", "HEAD"}:
            headers = Headers(scope=scope)
            if "authorization" not in headers and COOKIE in headers.get("cookie", ""):
                token = _cookie(headers["cookie"])
                if token:
                    added = (b"authorization", b"Bearer " + token.encode("latin-1"))
                    scope = {**scope, "headers": [*scope["headers"], added]}
        await self._app(scope, receive, send)


def _cookie(text: str) -> str | None:
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value.strip('"')
    return None
