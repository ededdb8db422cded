"""What every store answers, embedded, over HTTP or a fleet's back ends.

Times are Unix nanoseconds; ranges are half open: ``since_ns <= t < until_ns``. Frames have the
columns of :mod:`kansoku.model.tables`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.model import Origin, Receipt

__all__ = [
    "Aggregate",
    "Filters",
    "Matcher",
    "Matchers",
    "Rows",
    "Store",
    "Subscription",
    "matcher_list",
]

Rows: TypeAlias = pl.DataFrame | pa.Table
"""Rows to append: columns by name, missing ones null."""

Filters: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | Sequence[int] | None]
"""Column to the value it must equal, or to the values it may have; None is null."""


class Aggregate(StrEnum):
    """How the samples of one series in one step become one value."""

    AVG = "avg"
    MIN = "min"
    MAX = "max"
    SUM = "sum"
    COUNT = "count"
    LAST = "last"
    INCREASE = "increase"
    """Growth of a counter, resets counted as restarts from zero."""
    RATE = "rate"
    """``increase`` per second of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """One condition on a label; an absent label equals the empty text, as in PromQL."""

    label: str
    operator: str
    """``=``, ``!=``, ``=~`` or ``!~``; expressions match whole values."""
    value: str

    def __post_init__(self) -> None:
        if self.operator not in {"=", "!=", "=~", "!~"}:
            raise InputError(f"matcher operator {self.operator!r} is not one of = != =~ !~")
        if self.operator in {"=~", "!~"}:
            try:
                re.compile(self.value)
            except re.error as error:
                raise InputError(f"matcher {self.label}: {self.value!r}: {error}") from None

    def test(self) -> Callable[[str], bool]:
        """Return the condition as a function of the label's value."""
        if self.operator == "=":
            return self.value.__eq__
        if self.operator == "!=":
            return self.value.__ne__
        pattern = re.compile(self.value)
        if self.operator == "=~":
            return lambda value: pattern.fullmatch(value) is not None
        return lambda value: pattern.fullmatch(value) is None

    @classmethod
    def parse(cls, text: str) -> "Matcher":
        """Read ``label=value``, ``label!=value``, ``label=~expression``, ``label!~expression``."""
        match = re.fullmatch(r"([^=!~]+)(=~|!~|!=|=)(.*)", text, re.DOTALL)
        if match is None:
            raise InputError(f"{text!r} is not a matcher such as host.name=c001 or gpu=~[0-3]")
        return cls(label=match[1].strip(), operator=match[2], value=match[3])


Matchers: TypeAlias = Mapping[str, str | Sequence[str]] | Sequence[Matcher] | None
"""Label to its value or possible values, or a list of :class:`Matcher`."""


def matcher_list(matchers: Matchers) -> tuple[Matcher, ...]:
    """Return any form of matchers as a tuple of :class:`Matcher`."""
    if matchers is None:
        return ()
    if not isinstance(matchers, Mapping):
        return tuple(matchers)
    found = []
    for label, value in matchers.items():
        if isinstance(value, str):
            found.append(Matcher(label=label, operator="=", value=value))
        else:
            either = "|".join(re.escape(one) for one in value) or r"[^\s\S]"
            found.append(Matcher(label=label, operator="=~", value=either))
    return tuple(found)


class Subscription(Protocol):
    """Rows as they arrive; bounded: a slow reader loses the oldest and sees how many."""

    @property
    def dropped_batches(self) -> int:
        """Batches lost because the reader was too slow."""

    def get(self, timeout_s: float | None = None) -> tuple[str, pl.DataFrame] | None:
        """Return the next (table, rows), or None after the timeout or when closed."""

    def close(self) -> None:
        """Stop receiving."""

    def __iter__(self) -> Iterator[tuple[str, pl.DataFrame]]: ...


@runtime_checkable
class Store(Protocol):
    """The store, whoever keeps it."""

    def append(self, table: str, rows: Rows) -> Receipt:
        """Keep rows; return when they are durable. Raises BusyError or StoreError otherwise."""

    def commit(self, batches: Mapping[str, Rows], *, origin: Origin | None = None) -> Receipt:
        """Keep rows of several tables together, once per origin."""

    def table(
        self,
        name: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        filters: Filters | None = None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest."""

    def query(self, name: str, **params: Any) -> pl.DataFrame:
        """Return the answer of a named query; :data:`kansoku.store.QUERIES` lists them."""

    def metric_range(
        self,
        metric: str,
        matchers: Matchers = None,
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "avg",
        by: Sequence[str] | None = None,
        across: str = "avg",
    ) -> pl.DataFrame:
        """Return ``labels, time_ns, value``: one value per series and step, at the step's start.

        ``by`` merges series that agree on those labels with ``across`` (avg, min, max, sum,
        count); ``by=[]`` merges all.
        """

    def latest(
        self, metric: str, matchers: Matchers = None, *, at_ns: int | None = None
    ) -> pl.DataFrame:
        """Return ``metric, labels, time_ns, value``: each series' last sample before ``at_ns``.

        Samples older than five minutes before ``at_ns`` (default: the newest sample of the
        metric) are stale and left out.
        """

    def series(self, metric: str | None = None, matchers: Matchers = None) -> pl.DataFrame:
        """Return ``metric, labels`` of known series."""

    def events(
        self,
        since_ns: int | None = None,
        until_ns: int | None = None,
        *,
        subject: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        severity: str | None = None,
        contains: str | None = None,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return events in time order; with a limit, the newest."""

    def subscribe(self, tables: Sequence[str], *, capacity: int = 256) -> Subscription:
        """Return freshly kept rows of those tables from now on."""

    def close(self) -> None:
        """Finish what is queued and let go."""
