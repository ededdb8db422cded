"""Counters that wrap, stop at a limit or start anew, made to only grow."""

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class _State:
    raw: int
    grown: int


class Counters:
    """Keeps the last raw value of each series and a total that never falls.

    A raw value below the last one is a wrap where the counter is 32 bits wide, was in its upper
    quarter and is now in its lower quarter; everything else is a reset (driver reload, device
    reset), after which the counter began at zero, so its new value is what happened since.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, _State] = {}
        self.wraps = 0
        self.resets = 0

    def grow(self, series: Hashable, raw: int, *, bits: int = 64) -> int:
        """Return the total of a series, which starts at the first raw value seen."""
        state = self._states.get(series)
        if state is None:
            self._states[series] = _State(raw, raw)
            return raw
        step = raw - state.raw
        if step < 0:
            span = 1 << bits
            if bits <= 32 and state.raw >= span * 3 // 4 and raw < span // 4:
                self.wraps += 1
                step += span
            else:
                self.resets += 1
                step = raw
        state.raw = raw
        state.grown += step
        return state.grown
