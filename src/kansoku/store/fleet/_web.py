"""Requests to a back end: one client, errors that name it."""

from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from kansoku.errors import InputError, StoreError

__all__ = ["BackEnd"]


class BackEnd:
    """One HTTP back end."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            headers=dict(headers or {}), timeout=timeout_s, transport=transport
        )

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Return a successful response.

        Raises InputError where the back end calls the query wrong, StoreError for the rest.
        """
        try:
            response = self._client.request(method, self.url + path, **more)
        except httpx.HTTPError as error:
            raise StoreError(f"{type(error).__name__}: {error}", where=self.url) from None
        if response.is_success:
            return response
        text = f"HTTP {response.status_code}: {response.text[:300]}"
        if response.status_code in {400, 422}:
            raise InputError(text, where=self.url)
        raise StoreError(text, where=self.url)

    def json(self, method: str, path: str, **more: Any) -> Any:
        """Return a response's JSON."""
        response = self.request(method, path, **more)
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            raise StoreError(f"the answer is no JSON: {error}", where=self.url) from None

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()
