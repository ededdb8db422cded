"""The phases of a training step."""

from enum import StrEnum

__all__ = ["PHASES", "Phase"]


class Phase(StrEnum):
    """Where the time of a step goes; the phases of one step sum to its duration."""

    DATA_WAIT = "data_wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    """Exposed collective time: the main thread blocked in it, or the device idle while it runs."""
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    """Everything else: evaluation, garbage collection and compilation outside any phase."""


PHASES: tuple[Phase, ...] = tuple(Phase)
