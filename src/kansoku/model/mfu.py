"""Model FLOPs utilisation, never without its convention, peak and window."""

from dataclasses import dataclass

from kansoku.errors import InputError

__all__ = ["Mfu", "StepWindow", "live_mfu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Steps ``from_step`` to ``to_step``, both included."""

    from_step: int
    to_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mfu:
    """Model FLOPs per second divided by the peak of the hardware."""

    value: float
    """Ratio, 0-1."""
    convention: str
    """How model FLOPs were counted, such as ``6ND`` or ``full_attention``."""
    peak_flops: float
    """Dense peak of all devices of the job at the stated precision, FLOP/s."""
    peak_source: str
    """Where the peak comes from: datasheet, or ``measured: matrix product``."""
    window: StepWindow

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise InputError(
                f"MFU of {self.value:.3f} is outside 0-1: FLOPs convention {self.convention} or "
                f"peak {self.peak_flops:.3e} FLOP/s ({self.peak_source}) is wrong"
            )

    def to_json(self) -> dict[str, object]:
        """Return the MFU object that every JSON answer uses."""
        return {
            "value": self.value,
            "convention": self.convention,
            "peak_flops": self.peak_flops,
            "peak_source": self.peak_source,
            "window": {"from_step": self.window.from_step, "to_step": self.window.to_step},
        }


def live_mfu(flops: float, step_s: float, peak_flops: float) -> float | None:
    """Return the ratio of a step for a line that has no room for more; None above the peak.

    More than the peak cannot be: it was measured too low, as on a busy machine.
    """
    ratio = flops / step_s / peak_flops if step_s and peak_flops else None
    return ratio if ratio is None or ratio <= 1 else None
