"""Metrics from a PromQL back end: VictoriaMetrics or Prometheus.

Both answer in milliseconds. A step [a, a+s) is asked as a range vector ending 1 ms before a+s:
VictoriaMetrics, and Prometheus from version 3, leave the range's start out, Prometheus before
version 3 takes it in, so the range is 1 ms shorter there.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import polars as pl

from kansoku.errors import InputError, StoreError
from kansoku.store._interface import Aggregate, Matcher, Matchers, matcher_list
from kansoku.store._range import Grid, merge_across
from kansoku.store.fleet._web import BackEnd
from kansoku.store.fleet.names import Naming

__all__ = ["PromMetrics"]

_MS = 10**6
_STALE_MS = 300_000
_FUNCTIONS = {
    Aggregate.AVG: "avg_over_time",
    Aggregate.MIN: "min_over_time",
    Aggregate.MAX: "max_over_time",
    Aggregate.SUM: "sum_over_time",
    Aggregate.COUNT: "count_over_time",
    Aggregate.LAST: "last_over_time",
    Aggregate.INCREASE: "increase",
    Aggregate.RATE: "rate",
}
_SCHEMA = {"metric": pl.String, "labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64}


class PromMetrics:
    """Reads metrics; counters' growth is the back end's own ``increase`` and ``rate``."""

    def __init__(self, back_end: BackEnd, *, naming: Naming | None = None) -> None:
        self._web = back_end
        self._naming = naming or Naming()
        self._open_start: bool | None = None

    def _start_is_open(self) -> bool:
        """Return whether a range leaves its start out."""
        if self._open_start is None:
            try:
                info = self._web.json("GET", "/api/v1/status/buildinfo").get("data", {})
            except (InputError, StoreError):
                info = {}
            version = re.match(r"(\d+)\.", str(info.get("version", "")))
            # VictoriaMetrics answers 2.24.0 for Grafana's sake; Prometheus names its Go version.
            genuine = bool(info.get("goVersion"))
            self._open_start = not genuine or (version is not None and int(version[1]) >= 3)
        return self._open_start

    def _ask(self, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = self._web.json("POST", path, data=params)
        try:
            found: list[dict[str, Any]] = answer["data"]["result"]
        except (KeyError, TypeError):
            raise StoreError("the answer is not a PromQL server's", where=self._web.url) from None
        return found

    def _text(self, labels: dict[str, str], also: Sequence[str]) -> str:
        own = self._naming.back(labels, also)
        return orjson.dumps(own, option=orjson.OPT_SORT_KEYS).decode()

    def metric_range(
        self,
        metric: str,
        matchers: Matchers,
        *,
        grid: Grid,
        aggregate: Aggregate,
        by: Sequence[str] | None,
        across: str,
    ) -> pl.DataFrame:
        """Return ``labels, time_ns, value``; steps must be whole milliseconds."""
        if grid.step_ns % _MS:
            raise InputError("PromQL knows milliseconds: the step must be a multiple of 1000000 ns")
        every = matcher_list(matchers)
        step_ms = grid.step_ns // _MS
        width = step_ms if self._start_is_open() else step_ms - 1
        selector = self._naming.selector(metric, every)
        result = self._ask(
            "/api/v1/query_range",
            query=f"{_FUNCTIONS[aggregate]}({selector}[{width}ms])",
            start=_seconds(grid.start_ns + grid.step_ns - _MS),
            end=_seconds(grid.end_ns - _MS),
            step=_seconds(grid.step_ns),
        )
        also = [one.label for one in every]
        rows = []
        for series in result:
            text = self._text(series["metric"], also)
            rows += [
                (text, round(float(at) * 1000) * _MS + _MS - grid.step_ns, float(value))
                for at, value in series["values"]
            ]
        schema = {k: v for k, v in _SCHEMA.items() if k != "metric"}
        frame = pl.DataFrame(rows, schema=schema, orient="row").sort("labels", "time_ns")
        if by is None:
            return frame
        texts = dict(enumerate(frame["labels"].unique().to_list()))
        numbers = pl.DataFrame(
            {"series": list(texts), "labels": list(texts.values())},
            schema={"series": pl.Int32, "labels": pl.String},
        )
        return merge_across(frame.join(numbers, on="labels"), texts, by, across)

    def samples(
        self, metric: str | None, matchers: Sequence[Matcher], since_ns: int, until_ns: int
    ) -> pl.DataFrame:
        """Return ``metric, labels, time_ns, value`` of ``since_ns <= time < until_ns``."""
        since_ms, until_ms = -(-since_ns // _MS), -(-until_ns // _MS)
        if since_ms >= until_ms:
            return pl.DataFrame(schema=_SCHEMA)
        width = until_ms - since_ms + (0 if self._start_is_open() else -1)
        selector = self._naming.selector(metric, matchers)
        result = self._ask(
            "/api/v1/query",
            query=f"{selector}[{max(width, 1)}ms]",
            time=_seconds((until_ms - 1) * _MS),
        )
        return pl.DataFrame(
            list(self._rows(metric, matchers, result)), schema=_SCHEMA, orient="row"
        ).sort("time_ns", maintain_order=True)

    def _rows(
        self, metric: str | None, matchers: Sequence[Matcher], result: list[dict[str, Any]]
    ) -> Iterator[tuple[str, str, int, float]]:
        also = [one.label for one in matchers]
        for series in result:
            labels = series["metric"]
            name = metric or labels.get("__name__", "")
            text = self._text(labels, also)
            for at, value in series.get("values", ()):
                yield name, text, round(float(at) * 1000) * _MS, float(value)

    def latest(self, metric: str, matchers: Matchers, at_ns: int) -> pl.DataFrame:
        """Return each series' last sample in the five minutes until ``at_ns``."""
        every = matcher_list(matchers)
        frame = self.samples(metric, every, at_ns - _STALE_MS * _MS, at_ns + _MS)
        return frame.group_by("metric", "labels", maintain_order=True).last()

    def series(self, metric: str | None, matchers: Matchers) -> pl.DataFrame:
        """Return ``metric, labels`` of known series."""
        every = matcher_list(matchers)
        answer = self._web.json(
            "GET",
            "/api/v1/series",
            params={"match[]": self._naming.selector(metric, every), "start": "0"},
        )
        also = [one.label for one in every]
        rows = [
            (metric or labels.get("__name__", ""), self._text(labels, also))
            for labels in answer.get("data", ())
        ]
        schema = {"metric": pl.String, "labels": pl.String}
        return pl.DataFrame(sorted(rows), schema=schema, orient="row")

    def close(self) -> None:
        """Let go of connections."""
        self._web.close()


def _seconds(time_ns: int) -> str:
    """Return seconds with milliseconds, exactly."""
    return f"{time_ns // 10**9}.{time_ns % 10**9 // _MS:03d}"
