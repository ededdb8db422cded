"""Intervals of rates and shares from few events, without a statistics package.

The χ² quantile is the inverse of the regularised lower incomplete gamma function (series and
continued fraction, Abramowitz & Stegun 6.5.29 and 6.5.31), found by safeguarded Newton steps.
"""

import math

from kansoku.errors import InputError

__all__ = [
    "binomial_interval",
    "chi_square_quantile",
    "gamma_cdf",
    "mean_time_interval",
    "rate_ratio_interval",
]

_TINY = 1e-300
_STEPS = 10_000


def gamma_cdf(shape: float, x: float) -> float:
    """Return P(shape, x), the regularised lower incomplete gamma function, 0-1."""
    if x <= 0:
        return 0.0
    front = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for k in range(1, _STEPS):
            term *= x / (shape + k)
            total += term
            if term < total * 1e-16:
                break
        return min(front * total, 1.0)
    b = x + 1 - shape
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for k in range(1, _STEPS):
        a = -k * (k - shape)
        b += 2
        d = 1 / (a * d + b or _TINY)
        c = b + a / c or _TINY
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return max(1 - front * fraction, 0.0)


def chi_square_quantile(probability: float, degrees: float) -> float:
    """Return the value below which χ² with ``degrees`` of freedom falls with the probability."""
    if not 0 <= probability < 1 or degrees <= 0:
        raise InputError(f"χ² quantile of {probability} with {degrees} degrees is not defined")
    if probability == 0:
        return 0.0
    shape = degrees / 2
    low, high = 0.0, max(degrees, 1.0)
    while gamma_cdf(shape, high / 2) < probability:
        low, high = high, high * 2
    x = (low + high) / 2
    for _ in range(200):
        error = gamma_cdf(shape, x / 2) - probability
        if error > 0:
            high = x
        else:
            low = x
        log_density = (shape - 1) * math.log(x / 2) - x / 2 - math.lgamma(shape) - math.log(2)
        step = error / math.exp(log_density) if log_density > -600 else math.inf
        following = x - step
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - x) <= 1e-14 * x:
            return following
        x = following
    return x


def mean_time_interval(
    events: int, exposure: float, *, confidence: float = 0.9
) -> tuple[float, float | None]:
    """Return the χ² interval of the mean time between events, in the unit of the exposure.

    ``events`` were counted during a fixed ``exposure`` (time-truncated): the lower end is
    2T / χ²(1-α/2; 2k+2), the upper 2T / χ²(α/2; 2k). Without events there is no upper end (None).
    """
    if events < 0 or exposure < 0 or not 0 < confidence < 1:
        raise InputError(f"no interval for {events} events in {exposure} at {confidence}")
    tail = (1 - confidence) / 2
    low = 2 * exposure / chi_square_quantile(1 - tail, 2 * events + 2)
    high = 2 * exposure / chi_square_quantile(tail, 2 * events) if events else None
    return low, high


def binomial_interval(
    successes: int, trials: int, *, confidence: float = 0.9
) -> tuple[float, float]:
    """Return the Wilson score interval of a share, 0-1; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    # The square of a standard normal is χ² with one degree of freedom.
    z2 = chi_square_quantile(confidence, 1)
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def rate_ratio_interval(
    events_a: int, exposure_a: float, events_b: int, exposure_b: float, *, confidence: float = 0.9
) -> tuple[float | None, float | None]:
    """Return bounds of rate a / rate b; None where the data give no bound.

    Given the sum of events, those of a are binomial; the Wilson interval of that share becomes
    the interval of the ratio.
    """
    if exposure_a <= 0 or exposure_b <= 0 or events_a + events_b == 0:
        return None, None
    low, high = binomial_interval(events_a, events_a + events_b, confidence=confidence)
    scale = exposure_b / exposure_a
    return (
        low / (1 - low) * scale if events_a else 0.0,
        high / (1 - high) * scale if events_b else None,
    )
