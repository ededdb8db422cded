"""Figures of each port and direction over any stretch of windows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kansoku.burst.policy import BurstPolicy
from kansoku.burst.rows import WINDOW_METRIC

__all__ = ["PortSummary", "Quantiles", "summarise"]

_LARGEST = {"peak", "line_rate", "sampling", "refresh", "refresh_suspected"}  # the rest adds up
_WINDOW_SCHEMA = {
    "node": pl.String(),
    "port": pl.String(),
    "direction": pl.String(),
    "figure": pl.String(),
    "value": pl.Float64(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Median, 90th percentile and maximum, in nanoseconds."""

    p50: int
    p90: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSummary:
    """What one port and direction did."""

    node: str
    port: str
    direction: str
    line_rate_bytes_per_s: float | None
    sampling_ns: int | None
    observed_ns: int | None
    """Time the windows cover; None when only bursts were kept."""
    bursts: int
    duration: Quantiles | None
    """None without bursts."""
    gap: Quantiles | None
    """From the end of a burst to the start of the next; None below two bursts."""
    peak_ratio: float | None
    mean_ratio: float | None
    """Load over the whole time, of line rate."""
    bytes_in_bursts_ratio: float | None
    single_sample_ratio: float | None
    """Share of bursts of one sample: their length is not known."""
    missed_ratio: float | None
    samples: int | None
    refresh_ns: int | None
    refresh_certain: bool
    beside: Mapping[str, int] = field(default_factory=dict)
    """Growth of drops, pauses and congestion marks over the time."""
    notes: Sequence[str] = ()


def summarise(
    bursts: pl.DataFrame, metrics: pl.DataFrame, policy: BurstPolicy | None = None
) -> list[PortSummary]:
    """Return a summary per node, port and direction.

    ``bursts`` has the columns of that table, ``metrics`` the rows of the window sums (others are
    passed over).
    """
    policy = policy or BurstPolicy()
    figures: dict[tuple[str, str, str], dict[str, float]] = {}
    for node, port, direction, name, value in _figures(metrics).iter_rows():
        own = figures.setdefault((node, port, direction), {})
        own[name] = max(own.get(name, 0.0), value) if name in _LARGEST else (
            own.get(name, 0.0) + value
        )  # fmt: skip
    groups = {
        (str(key[0]), str(key[1]), str(key[2])): frame
        for key, frame in bursts.group_by(["node", "port", "direction"])
    }
    keys = sorted(set(figures) | set(groups))
    return [
        _summary(key, groups.get(key, bursts.clear()), figures.get(key, {}), policy) for key in keys
    ]


def _figures(metrics: pl.DataFrame) -> pl.DataFrame:
    rows = metrics.filter(pl.col("metric").str.starts_with(WINDOW_METRIC))
    parsed = []
    for text in rows["labels"].unique().to_list():
        labels = json.loads(text)
        parsed.append(
            {
                "labels": text,
                "node": labels.get("host.name", ""),
                "port": labels.get("network.interface.name", ""),
                "direction": labels.get("network.io.direction", ""),
                "counter": labels.get("kansoku.burst.counter"),
            }
        )
    if not parsed:
        return pl.DataFrame(schema=_WINDOW_SCHEMA)
    named = pl.DataFrame(parsed, schema_overrides={"counter": pl.String()})
    name = pl.col("metric").str.strip_prefix(WINDOW_METRIC)
    return (
        rows.join(named, on="labels")
        .sort("time_ns")
        .with_columns(figure=pl.concat_str(name, "counter", separator=".", ignore_nulls=True))
        .select(list(_WINDOW_SCHEMA))
    )


def _quantiles(values: np.ndarray) -> Quantiles | None:
    if len(values) == 0:
        return None
    middle, high = np.quantile(values, [0.5, 0.9])
    return Quantiles(p50=int(middle), p90=int(high), max=int(values.max()))


def _summary(
    key: tuple[str, str, str],
    bursts: pl.DataFrame,
    figures: Mapping[str, float],
    policy: BurstPolicy,
) -> PortSummary:
    bursts = bursts.sort("start_ns")
    start, length = bursts["start_ns"].to_numpy(), bursts["duration_ns"].to_numpy()
    gaps = start[1:] - (start + length)[:-1]
    count = len(bursts)
    single = int((bursts["samples"] == 1).sum())
    rate, observed = figures.get("line_rate"), figures.get("time")
    total, samples = figures.get("bytes"), figures.get("samples")
    missed = figures.get("missed", 0.0)
    in_bursts = int(bursts["bytes"].sum() or 0)
    peak = bursts["peak_ratio"].max() if count else None
    peaks = [float(v) for v in (peak, figures.get("peak")) if isinstance(v, int | float)]
    sampling = bursts["sampling_ns"].max() if count else None
    if "sampling" in figures:
        sampling = round(figures["sampling"] * 1e9)
    certain = "refresh" in figures
    behind = figures.get("refresh", figures.get("refresh_suspected"))
    refresh = None if behind is None else round(behind * 1e9)
    summary = {
        "mean_ratio": total / observed / rate if total is not None and observed and rate
        else None,
        "bytes_in_bursts_ratio": None if total is None
        # Bursts at the edge of the time may lie partly outside it.
        else min(in_bursts / total, 1.0) if total else 0.0,
        "single_sample_ratio": single / count if count else None,
        "missed_ratio": missed / (samples + missed) if samples else None,
    }  # fmt: skip
    return PortSummary(
        node=key[0],
        port=key[1],
        direction=key[2],
        line_rate_bytes_per_s=rate,
        sampling_ns=int(sampling) if isinstance(sampling, int | float) else None,
        observed_ns=None if observed is None else round(observed * 1e9),
        bursts=count,
        duration=_quantiles(length),
        gap=_quantiles(gaps),
        peak_ratio=max(peaks, default=None),
        samples=None if samples is None else int(samples),
        refresh_ns=refresh,
        refresh_certain=certain,
        beside={
            name.removeprefix("beside."): int(value)
            for name, value in sorted(figures.items())
            if name.startswith("beside.")
        },
        notes=_notes(summary, sampling, refresh, policy, certain=certain),
        **summary,
    )


def _notes(
    summary: Mapping[str, float | None],
    sampling: object,
    refresh: int | None,
    policy: BurstPolicy,
    *,
    certain: bool,
) -> tuple[str, ...]:
    notes = []
    single, missed = summary["single_sample_ratio"], summary["missed_ratio"]
    if single is not None and single >= policy.single_sample_ratio:
        each = f" of {sampling / 1e6:g} ms" if isinstance(sampling, int | float) else ""
        notes.append(
            f"{single:.0%} of the bursts are one sample{each} long: they may be shorter and higher"
            " than measured; sample faster"
        )
    if missed is not None and missed > policy.missed_ratio:
        notes.append(f"{missed:.2%} of the readings were missed: bursts in between look flatter")
    if refresh is not None and certain:
        notes.append(
            f"the counter is renewed only every {refresh / 1e6:.3g} ms (it jumped by more than the"
            " line can carry): rates are from renewal to renewal, shorter bursts are invisible"
        )
    elif refresh is not None:
        notes.append(
            f"the counter changed only every {refresh / 1e6:.3g} ms: it is renewed so seldom, or"
            " the traffic has that rhythm"
        )
    return tuple(notes)
