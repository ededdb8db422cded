"""Ranks that were started again or several times at once: which processes belong together.

After an elastic restart, or where a program replaces itself (exec), a rank counts its steps and
collectives from zero again. All ranks of one start make a *life* of the job; numbers of later lives
go on after those of earlier ones, so that nothing of one is taken for the same of another.

Trainings without a process group that one script starts at once all call themselves rank 0. They
have nothing to do with each other: one of them stands for the run, the others are left out.
"""

from collections.abc import Sequence

__all__ = ["lives", "numbered_on", "strangers"]


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


def strangers(
    processes: Sequence[tuple[int, int, int]], joined: Sequence[bool]
) -> dict[int, list[int]]:
    """Map processes that stand for their rank to those that named themselves it meanwhile.

    ``joined`` says which are in a process group: they are the job's, else who was there longest is
    shown. Several that joined cannot be told apart and stay.

    >>> strangers([(0, 0, 9), (0, 5, 12), (0, 6, 30), (0, 31, 40)], [False] * 4)
    {2: [0, 1]}
    >>> strangers([(0, 0, 9), (0, 5, 99)], [True, False])
    {0: [1]}
    """
    together: dict[tuple[int, int], list[int]] = {}
    for number, life in enumerate(lives(processes)):
        together.setdefault((processes[number][0], life), []).append(number)
    found = {}
    for mine in together.values():
        chosen = max(mine, key=lambda n: (joined[n], processes[n][2] - processes[n][1]))
        others = [n for n in mine if n != chosen and not joined[n]]
        if others:
            found[chosen] = others
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
