"""From counter readings of one port and direction to bursts, block by block.

Rates are divided by the measured interval, never by the nominal one: at 1 ms a late wake-up of
0.3 ms would else read as 130 % of line rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kansoku.burst.policy import BurstPolicy
from kansoku.burst.refresh import changed_samples, refresh_samples

__all__ = ["Burst", "Detector", "PortWindow", "ratios"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_PROOF = 3  # steps that no line could carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One unbroken run above the policy's share of line rate."""

    start_ns: int
    """Unix time of the reading before the first sample over the threshold."""
    duration_ns: int
    """To the reading of the last sample of the run; no finer than the sampling."""
    peak_ratio: float
    """Highest sample, of line rate."""
    mean_ratio: float
    bytes: int
    samples: int
    raw: tuple[tuple[int, float], ...] = ()
    """(end of the sample relative to ``start_ns``, ratio) from before to after the burst."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Growth of the counters beside it (drops, pauses, congestion marks) over the raw window."""


@dataclass(slots=True, kw_only=True)
class PortWindow:
    """What one window of one port and direction came to; bursts are listed apart."""

    start_ns: int
    end_ns: int
    samples: int = 0
    missed: int = 0
    """Readings that should have been taken and were not, by the nominal interval."""
    bytes: int = 0
    burst_bytes: int = 0
    burst_ns: int = 0
    bursts: int = 0
    single_sample: int = 0
    """Bursts of one sample: shorter than the sampling can measure."""
    observed_ns: int = 0
    peak_ratio: float = 0.0
    refresh_ns: int | None = None
    """How often the counter seems to be renewed, where that is slower than the sampling."""
    refresh_certain: bool = False
    """Its steps were larger than the line can carry; rates are then taken from renewal to renewal.
    Otherwise traffic of that rhythm looks the same."""
    beside: dict[str, int] = field(default_factory=dict)


def ratios(times_ns: Ints, counter: Ints, line_rate_bytes_per_s: float) -> tuple[Floats, Ints]:
    """Return each interval's share of line rate and its bytes, shape ``(samples - 1,)``.

    A counter that went back (driver reloaded, port reset) gives no bytes for that interval.
    """
    elapsed = np.diff(times_ns).astype(np.float64)
    grown = np.maximum(np.diff(counter), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(elapsed > 0, grown * 1e9 / elapsed / line_rate_bytes_per_s, 0.0)
    return ratio, grown


def _runs(ratio: Floats, policy: BurstPolicy, *, high: bool) -> Ints:
    """Return (first, past the last) interval of every run, shape ``(runs, 2)``.

    Hysteresis: between the two thresholds the state before holds on.
    """
    known = np.where(ratio >= policy.start_ratio, 1, np.where(ratio < policy.end_ratio, 0, -1))
    index = np.where(known >= 0, np.arange(len(known)), -1)
    np.maximum.accumulate(index, out=index)
    state = np.where(index >= 0, known[np.maximum(index, 0)], int(high))
    edges = np.diff(np.concatenate([[0], state, [0]]))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1)


class Detector:
    """Bursts of one port and direction from blocks of readings, in time order.

    Blocks of any size give the same bursts: what is not finished at the end of a block, and the
    raw samples before it, are kept for the next one.
    """

    def __init__(
        self,
        *,
        line_rate_bytes_per_s: float,
        interval_ns: int,
        policy: BurstPolicy | None = None,
    ) -> None:
        """``interval_ns`` is the nominal sampling interval."""
        self.policy = policy or BurstPolicy()
        self.line_rate_bytes_per_s = line_rate_bytes_per_s
        self._interval_ns = interval_ns
        self._times = np.zeros(0, dtype=np.int64)
        self._counter = np.zeros(0, dtype=np.int64)
        self._beside: dict[str, Ints] = {}
        self._last = (self._times, self._counter)  # the newest reading, fresh or not
        self._next = 0  # first interval of what is kept that belongs to no finished run yet
        self._high = False
        self.refresh: int | None = None
        """Samples between two renewals of the counter, once it was recognised as slow."""
        self._window: PortWindow | None = None

    def feed(
        self, times_ns: Ints, counter: Ints, beside: Mapping[str, Ints] | None = None
    ) -> list[Burst]:
        """Take readings (Unix time, bytes) and return the bursts that are over.

        ``beside`` are cumulative counters read with them, by name.
        """
        beside = dict(beside or {})
        if len(times_ns) == 0:
            return []
        fresh = np.concatenate([self._last[1], counter])
        self._count(np.concatenate([self._last[0], times_ns]), fresh, beside)
        known, self._last = len(self._last[0]), (times_ns[-1:], counter[-1:])
        if self.refresh is not None:
            keep = changed_samples(fresh, self.refresh)
            keep = keep[keep > 0] - known  # the first is not fresh, or was kept before
            times_ns, counter = times_ns[keep], counter[keep]
            beside = {name: values[keep] for name, values in beside.items()}
        self._times = np.concatenate([self._times, times_ns])
        self._counter = np.concatenate([self._counter, counter])
        empty = np.zeros(0, dtype=np.int64)
        self._beside = {
            name: np.concatenate([self._beside.get(name, empty), values])
            for name, values in beside.items()
        }
        self._peak(len(times_ns))
        return self._finish(final=False)

    def flush(self) -> list[Burst]:
        """End the stream: return the bursts that were still open or waiting for their context."""
        return self._finish(final=True)

    def window(self) -> PortWindow | None:
        """Return the summary since the last call and begin a new one; None without readings."""
        done, self._window = self._window, None
        return done

    # -- summary ----------------------------------------------------------------------------

    def _count(self, times: Ints, counter: Ints, beside: Mapping[str, Ints]) -> None:
        window = self._window
        if window is None:
            window = self._window = PortWindow(start_ns=int(times[0]), end_ns=int(times[-1]))
        window.end_ns = int(times[-1])
        if len(times) < 2:
            return
        elapsed = np.diff(times)
        window.samples += len(elapsed)
        window.missed += int(np.maximum(np.rint(elapsed / self._interval_ns) - 1, 0).sum())
        window.observed_ns += int(times[-1] - times[0])
        ratio, grown = ratios(times, counter, self.line_rate_bytes_per_s)
        window.bytes += int(grown.sum())
        found = refresh_samples(counter)
        if found is not None:
            window.refresh_ns = round(found * float(np.median(elapsed)))
            # No port sends faster than its line: only a counter that was behind jumps so far.
            if np.count_nonzero(ratio > self.policy.impossible_ratio) >= _PROOF:
                self.refresh = found
        if self.refresh is not None:
            window.refresh_certain = True
            window.refresh_ns = round(self.refresh * float(np.median(elapsed)))
        for name, values in beside.items():
            before = self._beside.get(name)
            first = before[-1] if before is not None and len(before) else values[0]
            growth = max(int(values[-1] - first), 0)
            window.beside[name] = window.beside.get(name, 0) + growth

    def _peak(self, new: int) -> None:
        times, counter = self._times[-new - 1 :], self._counter[-new - 1 :]
        ratio, _ = ratios(times, counter, self.line_rate_bytes_per_s)
        if self._window is not None and new and len(ratio):
            self._window.peak_ratio = max(self._window.peak_ratio, float(ratio.max()))

    # -- bursts -----------------------------------------------------------------------------

    def _finish(self, *, final: bool) -> list[Burst]:
        times, policy = self._times, self.policy
        if len(times) < 2:
            return []
        ratio, grown = ratios(times, self._counter, self.line_rate_bytes_per_s)
        todo = ratio[self._next :]
        runs = _runs(todo, policy, high=self._high) + self._next
        last = int(times[-1])
        bursts = []
        keep_from = len(ratio)  # first interval that must stay
        next_at, high = len(ratio), False
        for first, past in runs.tolist():
            ended = past < len(ratio)
            settled = ended and last - int(times[past]) >= policy.context_ns
            too_long = not ended and last - int(times[first]) >= policy.longest_ns
            if not (settled or too_long or final):
                keep_from = next_at = first
                high = self._high and first == self._next
                break
            bursts.append(self._burst(ratio, grown, first, past))
            high = too_long
        self._trim(times, keep_from, next_at, high=high)
        return bursts

    def _trim(self, times: Ints, keep_from: int, next_at: int, *, high: bool) -> None:
        """Keep what later bursts need: the context before, and everything unfinished."""
        edge = int(times[keep_from]) - self.policy.context_ns
        cut = min(int(np.searchsorted(times, edge)), keep_from)
        self._times = times[cut:]
        self._counter = self._counter[cut:]
        self._beside = {name: values[cut:] for name, values in self._beside.items()}
        self._next = next_at - cut
        self._high = high

    def _burst(self, ratio: Floats, grown: Ints, first: int, past: int) -> Burst:
        times, policy = self._times, self.policy
        start, end = int(times[first]), int(times[past])
        size = int(grown[first:past].sum())
        low = int(np.searchsorted(times, start - policy.context_ns))
        top = max(int(np.searchsorted(times, end + policy.context_ns, side="right")) - 1, past)
        where = np.arange(low, top)
        if len(where) > policy.raw_samples:
            half = policy.raw_samples // 2
            where = np.concatenate([where[:half], where[-half:]])
        raw = tuple((int(times[i + 1]) - start, round(float(ratio[i]), 4)) for i in where.tolist())
        beside = {}
        for name, values in self._beside.items():
            growth = int(values[top] - values[low])
            if growth > 0:
                beside[name] = growth
        duration = end - start
        burst = Burst(
            start_ns=start,
            duration_ns=duration,
            peak_ratio=float(ratio[first:past].max()),
            mean_ratio=size * 1e9 / duration / self.line_rate_bytes_per_s if duration else 0.0,
            bytes=size,
            samples=past - first,
            raw=raw,
            beside=beside,
        )
        window = self._window
        if window is not None:
            window.bursts += 1
            window.burst_bytes += size
            window.burst_ns += duration
            window.single_sample += burst.samples == 1
        return burst
