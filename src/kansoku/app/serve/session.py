"""Browsers: a token in a cookie stands for the Authorization header, and no answer runs scripts."""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders

__all__ = ["COOKIE", "CookieSession", "StrictAnswers"]

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


class StrictAnswers:
    """Wrap the application; what has no policy of its own (JSON, files, refusals) may do nothing.

    A browser that is led to the JSON of a hostile job's name shows it and runs none of it.
    """

    def __init__(self, app: Any) -> None:
        """Keep the application."""
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Add the headers to answers that lack them."""

        async def strict(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("content-security-policy", _NOTHING)
                headers.setdefault("x-content-type-options", "nosniff")
            await send(message)

        await self._app(scope, receive, strict if scope["type"] == "http" else send)


# Styles may be inline: the site's icon is an answer, too.
_NOTHING = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def _cookie(text: str) -> str | None:
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value.strip('"')
    return None
