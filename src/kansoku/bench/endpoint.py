"""Latencies of an inference endpoint: what one request took, and percentiles over many.

Load is open-loop: requests arrive at random times of a given rate whether or not earlier ones have
ended, as users do. A closed loop would slow its own load down and hide the queue.

Time to first token: from sending to the first piece of text. Time per output token: from the first
piece to the last, over the tokens after the first. Both as in MLPerf Inference's server scenario.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.errors import InputError

__all__ = ["EndpointSummary", "Percentiles", "RequestResult", "arrivals", "summarise"]

MOST_REQUESTS = 1_000_000
"""Of one load; results are kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request; times in seconds since the load began."""

    planned_s: float
    """When it was due."""
    sent_s: float
    first_token_s: float | None
    end_s: float
    output_tokens: int | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of one latency, seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSummary:
    """The load and what came of it."""

    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    offered_per_s: float
    completed_per_s: float
    output_tokens_per_s: float | None
    time_to_first_token: Percentiles | None
    time_per_output_token: Percentiles | None
    end_to_end: Percentiles | None
    lateness_p99_s: float
    """How late requests were sent; large values mean that this client was the bottleneck."""


def arrivals(rate_per_s: float, duration_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Return Poisson arrival times within the duration, seconds, ascending."""
    if rate_per_s <= 0 or duration_s <= 0:
        raise InputError("rate and duration must be positive")
    expected = rate_per_s * duration_s
    if not expected <= MOST_REQUESTS:
        raise InputError(
            f"{rate_per_s:g} requests/s for {duration_s:g} s are {expected:,.0f} requests, above "
            f"{MOST_REQUESTS:,}",
            remedy="a lower --rate or fewer --seconds",
        )
    random = np.random.default_rng(seed)
    count = int(expected + 6 * expected**0.5 + 10)
    times = np.cumsum(random.exponential(1 / rate_per_s, count))
    return times[times < duration_s]


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    array = np.asarray(values, dtype=float)
    p50, p90, p99 = (float(np.percentile(array, q)) for q in (50, 90, 99))
    return Percentiles(p50=p50, p90=p90, p99=p99, mean=float(array.mean()))


def summarise(results: Sequence[RequestResult], *, offered_per_s: float) -> EndpointSummary:
    """Sum up; failed requests count in ``failed`` and in no latency."""
    if not results:
        raise InputError("no request fell into the duration", remedy="more rate or time")
    good = [r for r in results if r.error is None]
    errors: dict[str, int] = {}
    for one in results:
        if one.error is not None:
            errors[one.error] = errors.get(one.error, 0) + 1
    duration = max(r.end_s for r in results) - min(r.sent_s for r in results)
    tokens = [r.output_tokens for r in good if r.output_tokens is not None]
    per_token = [
        (r.end_s - r.first_token_s) / (r.output_tokens - 1)
        for r in good
        if r.first_token_s is not None and r.output_tokens is not None and r.output_tokens > 1
    ]
    firsts = [r.first_token_s - r.sent_s for r in good if r.first_token_s is not None]
    late = np.array([r.sent_s - r.planned_s for r in results])
    return EndpointSummary(
        requests=len(results),
        failed=len(results) - len(good),
        errors=errors,
        duration_s=duration,
        offered_per_s=offered_per_s,
        completed_per_s=len(good) / duration if duration else 0.0,
        output_tokens_per_s=sum(tokens) / duration if tokens and duration else None,
        time_to_first_token=_percentiles(firsts),
        time_per_output_token=_percentiles(per_token),
        end_to_end=_percentiles([r.end_s - r.sent_s for r in good]),
        lateness_p99_s=float(np.percentile(late, 99)),
    )
