"""When a rate is a burst, with the reason of each threshold."""

from dataclasses import dataclass

from kansoku.errors import ConfigurationError

__all__ = ["BurstPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPolicy:
    """Thresholds; every answer carries the policy used.

    The default follows the field's definition (Zhang et al., IMC 2017): an unbroken run of
    samples above half of line rate.
    """

    start_ratio: float = 0.5
    """A burst begins with the first sample at or above this share of line rate."""
    end_ratio: float = 0.4
    """It ends before the first sample below: a dip of one sample to 45 % does not make two."""
    window_s: float = 10.0
    """Length of a summary window."""
    context_ns: int = 5_000_000
    """Raw samples kept before and after each burst."""
    raw_samples: int = 64
    """Most raw samples kept with one burst; of longer ones the first and last."""
    longest_ns: int = 10_000_000_000
    """A run longer than this is cut: it is load, no microburst, and memory stays bounded."""
    impossible_ratio: float = 1.2
    """Samples above this share of line rate prove a counter that is renewed late."""
    single_sample_ratio: float = 0.5
    """From this share of one-sample bursts on, the sampling is said to be too coarse."""
    missed_ratio: float = 0.001
    """From this share of missed samples on, the answer says so."""

    def __post_init__(self) -> None:
        if not 0 < self.end_ratio <= self.start_ratio <= 1:
            raise ConfigurationError(
                f"burst thresholds: 0 < end ({self.end_ratio}) <= start ({self.start_ratio}) <= 1"
            )
        if self.window_s <= 0 or self.context_ns < 0 or self.raw_samples < 2:
            raise ConfigurationError("burst policy: window, context and raw samples are too small")
