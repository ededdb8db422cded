"""Which collective caused a burst, and what the probes on its path saw meanwhile."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["CollectiveShare", "ProbesBeside", "blame", "probes_beside", "shares"]

Ints = npt.NDArray[np.int64]
_PHASES = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "evaluation")
_BLAME = {
    "collective": pl.String(),
    "group": pl.String(),
    "sequence": pl.Int64(),
    "rank": pl.Int32(),
    "step": pl.Int32(),
    "phase": pl.String(),
    "overlap_ratio": pl.Float64(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShare:
    """How much of the bursts one collective (by name and group) stands for."""

    collective: str | None
    """None: no collective ran at that time."""
    group: str | None
    phase: str | None
    bursts: int
    burst_bytes: int
    bytes_ratio: float
    """Of the bytes in all bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbesBeside:
    """Probes from or to one port, during its bursts and otherwise."""

    node: str
    port: str
    inside: int
    """Probes (or windows of probes) that overlap a burst."""
    outside: int
    rtt_inside_ns: tuple[int, int] | None
    """Median and 99th percentile; of windows, the medians of their P50 and P99."""
    rtt_outside_ns: tuple[int, int] | None
    lost_inside: int
    lost_outside: int
    rank_correlation: float | None
    """Of window summaries: Spearman's, between time in bursts and RTT P99."""


def blame(bursts: pl.DataFrame, spans: pl.DataFrame, *, slack_ns: int = 1_000_000) -> pl.DataFrame:
    """Return ``bursts`` with collective, group, sequence, rank, step, phase and overlap_ratio.

    Per burst the collective span that overlaps it longest; spans count ``slack_ns`` longer, for
    what was handed over leaves the NIC a little later. ``overlap_ratio`` is of the burst. The
    phase is the span of another kind that overlaps longest. Both frames are of one node and its
    clock. Nulls where nothing overlaps.
    """
    rows: list[dict[str, object]] = []
    collectives = _Spans(spans.filter(pl.col("kind") == "collective"), slack_ns)
    phases = _Spans(spans.filter(pl.col("kind").is_in(_PHASES)), 0)
    for start, length in bursts.select("start_ns", "duration_ns").iter_rows():
        row: dict[str, object] = dict.fromkeys(_BLAME)
        best = collectives.longest(start, start + length)
        if best is not None:
            span, overlap = best
            row |= {name: span[name] for name in ("group", "sequence", "rank", "step")}
            row["collective"] = span["name"]
            row["overlap_ratio"] = min(overlap / length, 1.0) if length else 1.0
        phase = phases.longest(start, start + length)
        if phase is not None:
            row["phase"] = phase[0]["kind"]
            row["step"] = row["step"] if row["step"] is not None else phase[0]["step"]
        rows.append(row)
    return pl.concat([bursts, pl.DataFrame(rows, schema=_BLAME)], how="horizontal")


class _Spans:
    def __init__(self, spans: pl.DataFrame, slack_ns: int) -> None:
        self._rows = spans.filter(pl.col("duration_ns").is_not_null()).sort("start_ns")
        self._start: Ints = self._rows["start_ns"].to_numpy()
        self._end: Ints = self._start + self._rows["duration_ns"].to_numpy() + slack_ns
        # Monotone, so that the first span that may still run can be searched for.
        self._reach: Ints = np.maximum.accumulate(self._end) if len(self._end) else self._end

    def longest(self, start: int, end: int) -> tuple[dict[str, object], int] | None:
        low = int(np.searchsorted(self._reach, start, side="right"))
        high = int(np.searchsorted(self._start, end))
        if low >= high:
            return None
        overlap = np.minimum(self._end[low:high], end) - np.maximum(self._start[low:high], start)
        # Among equals the shortest span: the innermost of nested ones.
        length = self._end[low:high] - self._start[low:high]
        best = int(np.lexsort((length, -overlap))[0])
        if overlap[best] <= 0:
            return None
        return self._rows.row(low + best, named=True), int(overlap[best])


def shares(blamed: pl.DataFrame) -> list[CollectiveShare]:
    """Return the answer of :func:`blame` summed up per collective, largest first."""
    total = int(blamed["bytes"].sum() or 0)
    rows = (
        blamed.group_by("collective", "group", "phase")
        .agg(pl.len().alias("bursts"), pl.col("bytes").sum().alias("burst_bytes"))
        .sort("burst_bytes", "collective", descending=[True, False])
    )
    return [
        CollectiveShare(**row, bytes_ratio=row["burst_bytes"] / total if total else 0.0)
        for row in rows.iter_rows(named=True)
    ]


def probes_beside(bursts: pl.DataFrame, probes: pl.DataFrame) -> list[ProbesBeside]:
    """Return, per port with bursts, what probes from or to it (NODE/PORT) saw.

    Single probes (``window_ns`` null) count by their own time, ``rtt_p50_ns`` holding the RTT;
    window summaries by their window.
    """
    found = []
    for key, own in sorted(bursts.group_by(["node", "port"]), key=lambda pair: str(pair[0])):
        name = f"{key[0]}/{key[1]}"
        near = probes.filter((pl.col("source") == name) | (pl.col("target") == name))
        if len(near):
            found.append(_beside(str(key[0]), str(key[1]), own.sort("start_ns"), near))
    return found


def _beside(node: str, port: str, bursts: pl.DataFrame, probes: pl.DataFrame) -> ProbesBeside:
    start = bursts["start_ns"].to_numpy()
    end = np.maximum.accumulate(start + bursts["duration_ns"].to_numpy())
    began = probes["time_ns"].to_numpy()
    lasted = probes.select(
        pl.coalesce(pl.col("window_ns"), pl.col("rtt_p50_ns"), pl.lit(0))
    ).to_series().to_numpy()  # fmt: skip
    ended = began + lasted
    first = np.searchsorted(end, began, side="right")
    inside = (first < len(start)) & (start[np.minimum(first, len(start) - 1)] < ended)
    lost = probes["lost"].fill_null(0).to_numpy()
    middle = probes["rtt_p50_ns"].to_numpy().astype(np.float64)
    tail = probes["rtt_p99_ns"].to_numpy().astype(np.float64)
    windowed = probes["window_ns"].is_not_null().to_numpy()

    def rtt(where: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        m, t = middle[where], tail[where]
        m, t = m[~np.isnan(m)], t[~np.isnan(t)]
        if len(m) == 0:
            return None
        if windowed.any():
            return int(np.median(m)), int(np.median(t)) if len(t) else int(m.max())
        return int(np.median(m)), int(np.quantile(m, 0.99))

    return ProbesBeside(
        node=node,
        port=port,
        inside=int(inside.sum()),
        outside=int((~inside).sum()),
        rtt_inside_ns=rtt(inside),
        rtt_outside_ns=rtt(~inside),
        lost_inside=int(lost[inside].sum()),
        lost_outside=int(lost[~inside].sum()),
        rank_correlation=_correlation(start, end, began, ended, tail) if windowed.all() else None,
    )


def _correlation(
    start: Ints, end: Ints, began: Ints, ended: Ints, tail: npt.NDArray[np.float64]
) -> float | None:
    """Spearman's, of the time in bursts within each window against its RTT P99."""
    known = ~np.isnan(tail)
    if known.sum() < 5:
        return None
    burst = np.array(
        [
            np.maximum(np.minimum(end, b) - np.maximum(start, a), 0).sum()
            for a, b in zip(began[known].tolist(), ended[known].tolist(), strict=True)
        ],
        dtype=np.float64,
    )
    first, second = _ranks(burst), _ranks(tail[known])
    spread = first.std() * second.std()
    if spread == 0:
        return None
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread)


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(means[inverse], dtype=np.float64)
