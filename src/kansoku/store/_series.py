"""The series dictionary: (metric, labels) to a small integer, and label matching."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from kansoku.store._interface import Matcher

__all__ = ["NO_ROOM", "TOO_LONG", "SeriesDictionary", "TextLimits"]

Ids = npt.NDArray[np.int32]
NO_ROOM = -1
"""Instead of an id: there are as many series as may be."""
TOO_LONG = -2
"""Instead of an id: the metric's name or a label is longer than may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """What a series may be called, in bytes of UTF-8: its name stays in memory as long as it does.

    Labels as VictoriaMetrics has them (``-maxLabelNameLen``, ``-maxLabelValueLen``), which drops
    and counts such series too; OpenTelemetry ends names of instruments at 255 characters.
    """

    metric_bytes: int = 256
    label_name_bytes: int = 256
    label_value_bytes: int = 4096
    labels_bytes: int = 65_536
    """All labels of a series, as JSON."""

    def allow(self, metric: str, labels: str) -> bool:
        """Say whether a series may be called so."""
        if _size(metric) > self.metric_bytes:
            return False
        size = _size(labels)
        if size <= min(self.label_name_bytes, self.label_value_bytes):
            return True
        if size > self.labels_bytes:
            return False
        try:
            parsed = orjson.loads(labels)
        except orjson.JSONDecodeError:
            return True  # read as no labels
        return all(
            _size(name) <= self.label_name_bytes and _size(str(value)) <= self.label_value_bytes
            for name, value in (parsed.items() if isinstance(parsed, dict) else ())
        )


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


class SeriesDictionary:
    """Every series seen, bounded in number; ids are positions.

    One thread adds (the store's writer); others read: lists only grow, and a reader takes the
    length first.
    """

    def __init__(
        self, *, limit: int, limit_per_metric: int, texts: TextLimits | None = None
    ) -> None:
        self._limit = limit
        self._limit_per_metric = limit_per_metric
        self._texts = texts or TextLimits()
        self._ids: dict[tuple[str, str], int] = {}
        self.metrics: list[str] = []
        self.labels: list[str] = []
        self._by_metric: dict[str, list[int]] = {}
        self._parsed: dict[int, dict[str, str]] = {}
        self.last_time = np.full(1024, np.iinfo(np.int64).min, np.int64)
        self.last_value = np.full(1024, np.nan)

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """Take the rows of the series table, in id order."""
        for _, metric, labels in rows:
            self._add(metric, labels)

    def _add(self, metric: str, labels: str) -> int:
        number = len(self.labels)
        self.metrics.append(metric)
        self.labels.append(labels)
        self._ids[metric, labels] = number
        self._by_metric.setdefault(metric, []).append(number)
        if number >= len(self.last_time):
            grow = len(self.last_time)
            self.last_time = np.concatenate(
                [self.last_time, np.full(grow, np.iinfo(np.int64).min, np.int64)]
            )
            self.last_value = np.concatenate([self.last_value, np.full(grow, np.nan)])
        return number

    def forget_from(self, size: int) -> None:
        """Drop the series added since the dictionary had ``size``: their commit failed."""
        while len(self.labels) > size:
            number = len(self.labels) - 1
            metric, labels = self.metrics.pop(), self.labels.pop()
            del self._ids[metric, labels]
            self._by_metric[metric].pop()
            self._parsed.pop(number, None)

    def encode(self, metric: pa.ChunkedArray, labels: pa.ChunkedArray) -> Ids:
        """Return the id of every row, new series added; NO_ROOM or TOO_LONG for refused ones."""
        names, name_codes = _factorize(metric)
        texts, text_codes = _factorize(labels)
        pairs = name_codes.astype(np.int64) * max(len(texts), 1) + text_codes
        encoded = pa.array(pairs).dictionary_encode()
        unique = encoded.dictionary.to_numpy()
        ids = np.fromiter(
            (self._id(names[p // len(texts)], texts[p % len(texts)]) for p in unique.tolist()),
            np.int32,
            len(unique),
        )
        found: Ids = ids[encoded.indices.to_numpy()] if len(unique) else ids
        return found

    def _id(self, metric: str, labels: str) -> int:
        number = self._ids.get((metric, labels))
        if number is not None:
            return number
        known = len(self._by_metric.get(metric, ()))
        if len(self.labels) >= self._limit or known >= self._limit_per_metric:
            return NO_ROOM
        if not self._texts.allow(metric, labels):
            return TOO_LONG
        return self._add(metric, labels)

    def may_describe(self, metric: str) -> bool:
        """Say whether a metric of this name can have series at all."""
        return self._texts.allow(metric, "{}")

    def note_last(
        self, ids: Ids, times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> None:
        """Remember each series' newest sample."""
        if len(times) > 1 and not bool((times[1:] >= times[:-1]).all()):
            order = np.argsort(times, kind="stable")
            ids, times, values = ids[order], times[order], values[order]
        newer = times >= self.last_time[ids]
        # Assignment by index keeps the last of equal indices: the newest, as times ascend.
        self.last_time[ids[newer]] = times[newer]
        self.last_value[ids[newer]] = values[newer]

    def names(self) -> list[str]:
        """Return every metric, sorted."""
        return sorted(self._by_metric.copy())

    def parsed(self, number: int) -> dict[str, str]:
        """Return a series' labels; values are text."""
        found = self._parsed.get(number)
        if found is None:
            try:
                raw = orjson.loads(self.labels[number])
            except orjson.JSONDecodeError:
                raw = {}
            found = {k: v if isinstance(v, str) else str(v) for k, v in raw.items()}
            self._parsed[number] = found
        return found

    def find(self, metric: str | None, matchers: Sequence[Matcher]) -> Ids:
        """Return the ids of the series that match, ascending."""
        if metric is None:
            ids: Sequence[int] = range(len(self.labels))
        else:
            ids = self._by_metric.get(metric, ())[:]
        for matcher in matchers:
            test, label = matcher.test(), matcher.label
            ids = [number for number in ids if test(self.parsed(number).get(label, ""))]
        return np.fromiter(ids, np.int32, len(ids))


def _factorize(column: pa.ChunkedArray) -> tuple[list[str], npt.NDArray[np.int32]]:
    """Return distinct texts and the code of every row; null counts as the empty text."""
    if not pa.types.is_dictionary(column.type):
        column = column.fill_null("").dictionary_encode()
    column = column.unify_dictionaries()
    if column.num_chunks == 0:
        return [], np.zeros(0, np.int32)
    texts = [text or "" for text in column.chunk(0).dictionary.to_pylist()]
    codes = [c.indices.fill_null(-1).to_numpy(zero_copy_only=False) for c in column.chunks]
    joined = np.concatenate(codes)
    if len(joined) and joined.min() < 0:
        texts.append("")
        joined = np.where(joined < 0, len(texts) - 1, joined)
    return texts, joined.astype(np.int32, copy=False)
