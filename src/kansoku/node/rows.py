"""Samples and events as rows of the ``metrics`` and ``events`` tables."""

from collections.abc import Iterable, Sequence

import orjson
import polars as pl

from kansoku.model import table_schema
from kansoku.node.sample import Event, Labels, Sample, canonical_labels

__all__ = ["SeriesText", "event_rows", "sample_rows"]


class SeriesText:
    """Remembers the JSON of each label set: the same few thousand series come every round."""

    def __init__(self, host: str, *, limit: int = 100_000) -> None:
        """``limit`` bounds the memory against labels without end; then all is forgotten."""
        self._host = host
        self._limit = limit
        self._texts: dict[Labels, str] = {}

    def __call__(self, series: Labels) -> str:
        """Return the canonical JSON of labels and ``host.name``."""
        text = self._texts.get(series)
        if text is None:
            if len(self._texts) >= self._limit:
                self._texts.clear()
            text = self._texts[series] = canonical_labels(series, self._host)
        return text


def sample_rows(samples: Sequence[Sample], time_ns: int, text: SeriesText) -> pl.DataFrame:
    """Return samples of one moment in the ``metrics`` schema."""
    return pl.DataFrame(
        {
            "metric": [s.metric for s in samples],
            "labels": [text(s.labels) for s in samples],
            "time_ns": [time_ns] * len(samples),
            "value": [s.value for s in samples],
        },
        schema=table_schema("metrics"),
    )


def event_rows(events: Iterable[Event]) -> pl.DataFrame:
    """Return events in the ``events`` schema."""
    rows = [
        {
            "time_ns": e.time_ns,
            "source": e.source,
            "subject": e.subject,
            "severity": e.severity,
            "kind": e.kind,
            "body": e.body,
            "attributes": orjson.dumps(e.attributes, option=orjson.OPT_SORT_KEYS).decode(),
        }
        for e in events
    ]
    return pl.DataFrame(rows, schema=table_schema("events"))
