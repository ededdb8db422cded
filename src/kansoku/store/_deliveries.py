"""Which batches were kept already: (agent, sequence) as ranges, and digests of plain bodies."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator

__all__ = ["BodyDigests", "Deliveries"]


class Deliveries:
    """Sequences kept of every agent, as merged ranges: exact and small."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}

    def load(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Take rows of the table, in any order."""
        for agent, low, high in rows:
            self._insert(agent, low, high)

    def __contains__(self, key: tuple[str, int]) -> bool:
        agent, sequence = key
        ranges = self._ranges.get(agent, [])
        at = bisect_right(ranges, [sequence, 2**63]) - 1
        return at >= 0 and ranges[at][0] <= sequence <= ranges[at][1]

    def add(self, agent: str, sequence: int) -> None:
        """Remember one batch."""
        self._insert(agent, sequence, sequence)

    def _insert(self, agent: str, low: int, high: int) -> None:
        ranges = self._ranges.setdefault(agent, [])
        at = bisect_right(ranges, [low, 2**63])
        if at and ranges[at - 1][1] >= low - 1:
            at -= 1
            ranges[at][1] = max(ranges[at][1], high)
        else:
            ranges.insert(at, [low, high])
        while at + 1 < len(ranges) and ranges[at + 1][0] <= ranges[at][1] + 1:
            ranges[at][1] = max(ranges[at][1], ranges.pop(at + 1)[1])

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yield (agent, low, high)."""
        for agent, ranges in self._ranges.items():
            for low, high in ranges:
                yield agent, low, high


class BodyDigests:
    """Digests of recent request bodies; bounded."""

    def __init__(self, *, limit: int = 100_000) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._seen

    def add(self, digest: str, time_ns: int) -> None:
        """Remember one body, forgetting the oldest beyond the limit."""
        self._seen[digest] = time_ns
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def forget_before(self, time_ns: int) -> None:
        """Drop digests older than a time."""
        while self._seen and next(iter(self._seen.values())) < time_ns:
            self._seen.popitem(last=False)
