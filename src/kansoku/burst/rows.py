"""Bursts and window summaries as rows of the ``bursts`` and ``metrics`` tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from kansoku.burst.detect import Burst, PortWindow
from kansoku.model import table_schema

__all__ = ["BESIDE_METRIC", "WINDOW_METRIC", "PortBursts", "burst_rows", "window_rows"]

WINDOW_METRIC = "kansoku.burst.window."
"""Metrics of the window sums begin so; ``burst report`` adds them up."""
BESIDE_METRIC = "kansoku.burst.window.beside"
"""Growth of a counter beside the bytes; ``kansoku.burst.counter`` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortBursts:
    """What one window of one port and direction gave."""

    node: str
    port: str
    direction: str
    line_rate_bytes_per_s: float
    sampling_ns: int
    window: PortWindow
    bursts: Sequence[Burst]


def burst_rows(found: Sequence[PortBursts]) -> pl.DataFrame:
    """Return one row per burst; raw samples and the counters beside it stand in attributes."""
    rows = [
        {
            "node": one.node,
            "port": one.port,
            "direction": one.direction,
            "start_ns": burst.start_ns,
            "duration_ns": burst.duration_ns,
            "peak_ratio": burst.peak_ratio,
            "mean_ratio": burst.mean_ratio,
            "bytes": burst.bytes,
            "samples": burst.samples,
            "sampling_ns": one.sampling_ns,
            "attributes": json.dumps(
                {
                    "raw_us": [round(at / 1000, 1) for at, _ in burst.raw],
                    "raw_ratio": [ratio for _, ratio in burst.raw],
                    "beside": dict(burst.beside),
                },
                sort_keys=True,
            ),
        }
        for one in found
        for burst in one.bursts
    ]
    return pl.DataFrame(rows, schema=table_schema("bursts"))


def window_rows(found: Sequence[PortBursts]) -> pl.DataFrame:
    """Return the sums of each window as metric rows: ``burst report`` adds them up."""
    names, series, times, values = [], [], [], []
    for one in found:
        window = one.window
        labels = {
            "host.name": one.node,
            "network.interface.name": one.port,
            "network.io.direction": one.direction,
        }
        text = json.dumps(labels, sort_keys=True, separators=(",", ":"))
        figures: list[tuple[str, str, float]] = [
            ("samples", text, window.samples),
            ("missed", text, window.missed),
            ("bytes", text, window.bytes),
            ("burst_bytes", text, window.burst_bytes),
            ("burst_time", text, window.burst_ns / 1e9),
            ("bursts", text, window.bursts),
            ("single_sample", text, window.single_sample),
            ("time", text, window.observed_ns / 1e9),
            ("peak", text, window.peak_ratio),
            ("line_rate", text, one.line_rate_bytes_per_s),
            ("sampling", text, one.sampling_ns / 1e9),
        ]
        if window.refresh_ns is not None:
            name = "refresh" if window.refresh_certain else "refresh_suspected"
            figures.append((name, text, window.refresh_ns / 1e9))
        for name, growth in sorted(window.beside.items()):
            own = {**labels, "kansoku.burst.counter": name}
            figures.append(
                ("beside", json.dumps(own, sort_keys=True, separators=(",", ":")), growth)
            )
        for name, series_text, value in figures:
            names.append(WINDOW_METRIC + name)
            series.append(series_text)
            times.append(window.start_ns)
            values.append(float(value))
    return pl.DataFrame(
        {"metric": names, "labels": series, "time_ns": times, "value": values},
        schema=table_schema("metrics"),
    )
