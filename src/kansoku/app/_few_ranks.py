"""Name ranks in a sentence."""

from collections.abc import Sequence

__all__ = ["few_ranks"]


def few_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks with their noun; of many, the first three and the last.

    >>> few_ranks([3])
    'rank 3'
    >>> few_ranks([0, 1, 2])
    'ranks 0, 1, 2'
    >>> few_ranks(range(8))
    'ranks 0, 1, 2 … 7 (8 ranks)'
    """
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:3]))} … {ranks[-1]} ({len(ranks)} ranks)"
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
