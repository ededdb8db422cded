"""What was read of earlier requests: attributes' numbers, label texts, resources."""

import secrets
import threading
from typing import Any

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kansoku.telemetry._attributes import attribute_dict

__all__ = ["KNOWN", "PlainWalkError"]

_CACHE_ENTRIES = 500_000


class PlainWalkError(Exception):
    """Something only the plain walk reads."""


class _Known:
    """What was read before, of all requests; emptied when it grows too large."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers: dict[bytes, int] = {}
        self.labels: dict[int, str] = {}
        self.resources: dict[bytes, dict[str, Any]] = {}

    def number(self, raw: bytes) -> int:
        """Return the random number of these bytes, the same at every call."""
        found = self.numbers.get(raw)
        if found is None:
            found = self.numbers[raw] = secrets.randbits(64)
        return found

    def resource(self, raw: bytes) -> dict[str, Any]:
        """Return the attributes of a resource."""
        found = self.resources.get(raw)
        if found is None:
            found = attribute_dict(Resource.FromString(raw).attributes)
            self.resources[raw] = found
        return found

    def trim(self) -> None:
        """Forget everything when too much is known: labels go with their numbers."""
        if max(len(self.numbers), len(self.labels), len(self.resources)) > _CACHE_ENTRIES:
            self.numbers.clear()
            self.labels.clear()
            self.resources.clear()


KNOWN = _Known()
