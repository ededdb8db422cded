"""Fetch text over HTTP with the standard library: httpx would cost the agent 4 MB."""

import urllib.request

from kansoku.errors import InputError

__all__ = ["fetch_text"]

_LIMIT = 16 * 1024 * 1024
_TIMEOUT_S = 5.0


def fetch_text(url: str) -> str:
    """Return at most 16 MiB of text; raise OSError where nobody answers."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not an http:// or https:// address")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - checked above
        data: bytes = answer.read(_LIMIT)
    return data.decode("utf-8", "replace")
