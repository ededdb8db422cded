"""Folded stacks (``a;b;c 12``), as py-spy's raw format writes them and Pyroscope takes them."""

__all__ = ["merge_folded", "parse_folded"]

_MAX_STACKS = 100_000


def parse_folded(text: str) -> tuple[dict[str, int], int]:
    """Return stack → samples and the number of lines that made no sense."""
    stacks: dict[str, int] = {}
    bad = 0
    for line in text.splitlines():
        stack, space, count = line.rpartition(" ")
        if not (space and stack.strip() and count.isascii() and count.isdigit()):
            bad += bool(line.strip())
        elif len(count) <= 12 and (stack in stacks or len(stacks) < _MAX_STACKS):
            stacks[stack] = stacks.get(stack, 0) + int(count)
        else:
            bad += 1
    return stacks, bad


def merge_folded(stacks: dict[str, int]) -> str:
    """Return the text of stacks, the heaviest first."""
    ordered = sorted(stacks.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{stack} {count}\n" for stack, count in ordered)
