"""Ranks that were started again within one run: which of their processes belong together.

After an elastic restart, or where a program replaces itself (exec), a rank counts its steps and
collectives from zero again. All ranks of one start make a *life* of the job; numbers of later lives
go on after those of earlier ones, so that nothing of one is taken for the same of another.
"""

from collections.abc import Sequence

__all__ = ["lives", "numbered_on"]


def lives(processes: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the life of each process, given ``(rank, first, last)`` times of it.

    A process begins a new life when its rank had one in the present life that had ended by then.

    >>> lives([(0, 0, 9), (1, 0, 9), (0, 20, 30), (1, 21, 30)])
    [0, 0, 1, 1]
    >>> lives([(0, 0, 9), (0, 5, 12)])  # at the same time: no restart
    [0, 0]
    """
    life, present = 0, dict[int, int]()
    found = [0] * len(processes)
    for number in sorted(range(len(processes)), key=lambda n: processes[n][1]):
        rank, first, last = processes[number]
        if rank in present and present[rank] <= first:
            life, present = life + 1, {}
        present[rank] = max(last, present.get(rank, last))
        found[number] = life
    return found


def numbered_on(life: Sequence[int], highest: Sequence[int]) -> list[int]:
    """Return what to add to the numbers of each process; ``highest`` is its own, -1 for none.

    >>> numbered_on([0, 0, 1], [20, 19, 14])
    [0, 0, 21]
    """
    top: dict[int, int] = {}
    for one, number in zip(life, highest, strict=True):
        top[one] = max(top.get(one, -1), number)
    base, reached = {}, 0
    for one in sorted(top):
        base[one] = reached
        reached += top[one] + 1
    return [base[one] for one in life]
