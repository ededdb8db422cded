"""The window of a page: its length and end, as parameters, and its columns' step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kansoku.app.web_page import Choice, Parameter
from kansoku.errors import InputError

__all__ = ["HOUR_PARAMETERS", "WINDOW_PARAMETERS", "Span", "stamp", "window_choices", "window_of"]

S = 1_000_000_000
_LENGTHS = {"15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
_TEXTS = {
    "15m": "15 minutes", "1h": "1 hour", "6h": "6 hours", "24h": "24 hours", "7d": "7 days",
    "30d": "30 days",
}  # fmt: skip
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600)
_GRAIN_NS = 5 * S
_UNTIL = r"\d{10}|\d{19}|\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z"


def _parameters(default: str) -> tuple[Parameter, ...]:
    return (
        Parameter(
            name="window", meaning="length of the window", default=default, choices=tuple(_LENGTHS)
        ),
        Parameter(
            name="until",
            meaning="end of the window: a time such as 2026-01-31T12:00Z; now without it",
            pattern=_UNTIL,
        ),
    )


WINDOW_PARAMETERS = _parameters("24h")
HOUR_PARAMETERS = _parameters("1h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A half-open range of Unix nanoseconds."""

    since_ns: int
    until_ns: int
    now: bool
    """Whether it ends now, so that fresh rows belong to it."""

    def step_ns(self, columns: int) -> int:
        """Return a round step that gives at most so many columns."""
        least = (self.until_ns - self.since_ns) / S / columns
        return S * next((one for one in _STEPS_S if one >= least), -(-int(least) // 3600) * 3600)

    def grid(self, columns: int) -> "tuple[Span, int]":
        """Return the range widened to whole steps, so that the same cells come again; the step."""
        step = self.step_ns(columns)
        since, until = self.since_ns // step * step, -(-self.until_ns // step) * step
        return Span(since_ns=since, until_ns=until, now=self.now), step

    def to_json(self) -> dict[str, object]:
        """Return both ends as text and nanoseconds."""
        return {
            "since": stamp(self.since_ns),
            "until": stamp(self.until_ns),
            "since_ns": self.since_ns,
            "until_ns": self.until_ns,
        }


def stamp(time_ns: int | None) -> str | None:
    """Write a time to the second in UTC, as pages show in the reader's zone; None stays None."""
    if time_ns is None:
        return None
    moment = datetime.fromtimestamp(time_ns // S, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def window_of(values: Mapping[str, str], now_ns: int) -> Span:
    """Return the window that parameters ask for; raise InputError for an impossible date."""
    text = values.get("until")
    # Rounded up, so that a page and its columns, asked for one after the other, ask the same.
    until = -(-now_ns // _GRAIN_NS) * _GRAIN_NS if text is None else _moment(text)
    length = _LENGTHS[values["window"]] * S
    if not 0 < until - length < until < 2**62:
        raise InputError(f"until={text!r} lies outside what a clock can say")
    return Span(since_ns=until - length, until_ns=until, now=text is None)


def _moment(text: str) -> int:
    if re.fullmatch(r"\d+", text):
        return int(text) * (S if len(text) == 10 else 1)
    try:
        return int(datetime.fromisoformat(text).timestamp()) * S
    except ValueError:
        raise InputError(f"until={text!r} is not a date of the calendar") from None


def window_choices(values: Mapping[str, str]) -> tuple[Choice, Choice]:
    """Return the form's fields for the window."""
    return (
        Choice(
            name="window",
            label="Window",
            options=tuple(_TEXTS.items()),
            value=values["window"],
        ),
        Choice(name="until", label="Until (UTC; empty: now)", value=values.get("until", "")),
    )
