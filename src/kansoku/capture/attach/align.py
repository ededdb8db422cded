"""Which number a step has that several ranks take, each heard from another moment on.

Probes reach ranks one after the other, so each rank's own count of updates begins elsewhere. But a
group's collectives carry the same number on every rank and stand in the same step there: one that
two ranks were heard making says how far apart their counts are. The first rank heard making a
collective in a whole step gives the numbers; a rank that was there before its training began
counts from 0, and so do the others then.

Where no such collective is heard (pipelines without one, NCCL, whose works we see no number of),
ranks are told apart by time after a while, and it is said that they may be one step apart.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Alignment", "Place"]

_PATIENCE_NS = 5_000_000_000
_MOST_COLLECTIVES = 4096
"""Kept of each rank: more than a step has, so that ranks find one in common."""
BY_TIME = "seen from outside: no collective told which step is which on the other ranks, so this \
rank's steps are numbered by time: they may be one apart"


class Alignment:
    """The ranks of a node, by process."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}

    def place(self, process: int, say: Callable[[str], None] = lambda _: None) -> Place:
        """Return the place of a process not seen before, which tells by ``say`` what is unsure."""
        self.places[process] = Place(self, say)
        return self.places[process]

    def forget(self, process: int) -> None:
        """Drop a process that has ended: one started again counts anew."""
        self.places.pop(process, None)


class Place:
    """Where one rank is: its updates, and the collectives between them."""

    def __init__(self, alignment: Alignment, say: Callable[[str], None]):
        self._ranks, self._say = alignment.places, say
        self.index = 0
        """Updates seen that ended a step."""
        self.ahead: int | None = 0
        """What is to be added to ``index`` for the step's number; None: not known yet."""
        self.shared = False
        """It is known to be one rank of several."""
        self._steps: dict[tuple[str, int], int] = {}
        """Group and sequence of a collective → ``index`` of the step it stood in."""
        self._mixed: set[str] = set()
        self._collects = self._trains = self._whole = False
        self._patient_ns = 0
        self._asked = False
        self.updated_ns = 0
        """End of its last step."""

    @property
    def is_rank(self) -> bool:
        """Say whether it was heard training, or with others."""
        return self.index > 0 or self._collects

    @property
    def is_told(self) -> bool:
        """Say whether others can learn from its collectives which step is which."""
        return bool(self._steps)

    def number_at(self, collective: tuple[str, int]) -> int | None:
        """Return the number of the step with that collective, where it counts and made it."""
        index = self._steps.get(collective)
        if index is None or self.ahead is None or collective[0] in self._mixed:
            return None
        return index + self.ahead

    def at_work(self) -> None:
        """Note that the process trained before it was heard: which step it is in is not known."""
        self.ahead = None

    def begins(self) -> None:
        """Note that its training begins here, unless it was heard training already."""
        if not (self.index or self._collects or self._trains):
            self.ahead = 0

    def starts(self) -> None:
        """Note its first backward since the process began: it did not train before."""
        if not self.index:
            self.ahead = 0

    def mixes(self, group: str) -> None:
        """Note a point-to-point operation: they count in a group's sequence, not on all ranks."""
        self._mixed.add(group)

    def collects(self, group: str = "", sequence: int = -1, *, after: bool = False) -> None:
        """Take a collective, with its number where that is known.

        ``after``: an update came before it, which is still to be taken.
        """
        self._collects = True
        if sequence < 0 or group in self._mixed:
            return
        self._steps[group, sequence] = self.index + after
        if len(self._steps) > _MOST_COLLECTIVES:
            del self._steps[next(iter(self._steps))]

    def trains(self) -> None:
        """Take a backward: the update that follows it may end a whole step."""
        self._trains = True
        self._whole = self.index > 0

    def updates(self, now: int) -> int | None:
        """Take the end of a step; return the number of the next one, None where it is not known.

        Of a rank at work the first update only says where whole steps begin.
        """
        self.index += 1
        if self.ahead is None and self._whole:
            self.ahead = self._found(now)
        if self.index == 1 and self.ahead is None:
            self._steps.clear()  # the update before it may not have been seen
        self._whole = False
        self._patient_ns = self._patient_ns or now
        self.updated_ns = now
        return None if self.ahead is None else self.index + self.ahead

    def _found(self, now: int) -> int | None:
        others = [rank for rank in self._ranks.values() if rank.ahead is not None and rank.is_rank]
        told, self._asked = False, True
        for key in reversed(self._steps):
            if key[0] in self._mixed:
                continue
            told = True
            for other in others:
                number = other.number_at(key)
                if number is not None:
                    return number - self._steps[key]
        if told and not any(other.is_told for other in others):
            return -self.index  # the first that counts
        if not self._collects and not self.shared:
            return -self.index  # it trains alone
        if now - self._patient_ns < _PATIENCE_NS:
            return None
        self._say(BY_TIME)
        if not others:
            return -self.index
        # What ended is what the other ended last, or what it is in: whichever end is nearer.
        other = max(others, key=lambda rank: rank.updated_ns)
        last = now - other.updated_ns <= (now - self.updated_ns) // 2
        return other.index + (other.ahead or 0) + (0 if last else 1) - self.index

    def untold(self, now: int) -> str:
        """Return why the steps of a rank that updates have no numbers up to ``now``."""
        if not self._asked:
            return (
                "seen from outside: steps of a training at work count from its third update on, "
                "which was not heard; watch it longer"
            )
        return (
            "seen from outside: no collective told which of its steps is which within the "
            f"{(now - self._patient_ns) / 1e9:.1f} s it was heard; its steps are not numbered; "
            f"watch it longer than {_PATIENCE_NS // 1_000_000_000} s"
        )
