"""Where the history lies, which window is asked for, and how figures are written."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import polars as pl

from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError, InputError
from kansoku.jobs.edge.history import ParquetHistory
from kansoku.jobs.edge.slurm import local_zone
from kansoku.view.units import in_time

__all__ = [
    "Clock",
    "Window",
    "check_zone",
    "cluster_name",
    "hours",
    "open_history",
    "percent",
    "resolve_window",
    "seconds",
    "stamp",
    "store_folder",
]

Clock = Callable[[], int]
"""Returns Unix nanoseconds."""
NS = 1_000_000_000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A half-open range of Unix nanoseconds."""

    since_ns: int
    until_ns: int

    def to_json(self) -> dict[str, object]:
        """Return both ends as text and nanoseconds."""
        return {
            "since": stamp(self.since_ns, "UTC"),
            "until": stamp(self.until_ns, "UTC"),
            "since_ns": self.since_ns,
            "until_ns": self.until_ns,
        }


def open_history(store: str | Path | None = None) -> ParquetHistory:
    """Return the job history that lies beside (or in) the store's folder."""
    if store is not None and re.match(r"https?://", str(store)):
        raise InputError(
            "job history is kept in a folder, not behind a server", where=str(store),
            remedy="give --store DIR",
        )  # fmt: skip
    return ParquetHistory(store_folder(store) / "job-history")


def store_folder(store: str | Path | None) -> Path:
    """Return the folder of a store; its engine is loaded by those who read it, not here."""
    if store is not None:
        return Path(store)
    from kansoku.app.store import default_store

    return default_store()


def check_zone(name: str | None) -> str:
    """Return the time zone to read naive local times in; default this machine's."""
    zone = name or local_zone()
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise InputError(
            f"no time zone {zone!r}", where="--timezone", remedy="give a name such as Asia/Tokyo"
        ) from None
    return zone


def cluster_name(cluster: str | None) -> str | None:
    """Return Slurm's name of a cluster given as a file, a shipped name or Slurm's own name."""
    if cluster is None:
        return None
    try:
        found = load_cluster(cluster)
    except ConfigurationError:
        if Path(cluster).suffix == ".toml":
            raise
        return cluster
    return found.slurm_cluster or found.name


def resolve_window(
    since: str | None, until: str | None, jobs: pl.LazyFrame | None, *, now: Clock = time.time_ns
) -> Window:
    """Return the window of --since and --until; without them the whole history up to now."""
    now_ns = now()
    until_ns = _point(until, now_ns, "--until") if until else None
    since_ns = _point(since, now_ns, "--since") if since else None
    if (since_ns is None or until_ns is None) and jobs is not None:
        low, high, open_ = (
            jobs.select(
                low=pl.col("submit_ns").min(),
                high=pl.max_horizontal(pl.col("end_ns").max(), pl.col("submit_ns").max()),
                running=pl.col("end_ns").is_null().any(),
            )
            .collect()
            .row(0)
        )
        if since_ns is None:
            since_ns = low if low is not None else now_ns
        if until_ns is None:
            # An old export ends with its last job; running jobs make it reach until now.
            ended = high + 1 if high is not None else now_ns
            until_ns = now_ns if open_ and ended <= now_ns < ended + 86400 * NS else ended
    until_ns = now_ns if until_ns is None else until_ns
    if since_ns is None:
        raise InputError("no window", remedy="give --since and --until")
    if since_ns >= until_ns:
        raise InputError(
            f"the window is empty: {stamp(since_ns)} is not before {stamp(until_ns)}",
            where="--since/--until",
        )
    return Window(since_ns=since_ns, until_ns=until_ns)


def _point(text: str, now_ns: int, flag: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])(?: ago)?", text.strip())
    if match:
        return now_ns - round(float(match[1]) * _UNITS[match[2]] * NS)
    if text.strip() == "now":
        return now_ns
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(
            f"{text!r} is not a time", where=flag, remedy="give 2026-01-31, 2026-01-31T12:00 or 7d"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=ZoneInfo(local_zone()))
    return int(moment.timestamp()) * NS


def stamp(time_ns: int | None, zone: str | None = None) -> str:
    """Write a time to the second, in this machine's zone unless told; a dash for None."""
    if time_ns is None:
        return "–"
    moment = datetime.fromtimestamp(time_ns // NS, tz=ZoneInfo(zone or local_zone()))
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}Z" if zone == "UTC" else text


def percent(share: float | None, digits: int = 1) -> str:
    """Write a ratio as percent; a dash for None."""
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def hours(value: float | None) -> str:
    """Write hours with a precision that fits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Write a duration as people say it: 42 s, 13 min, 5.2 h, 3.1 d."""
    return in_time(value) or "–"
