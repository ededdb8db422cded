"""Ports, flow labels, and how many tuples cover all parallel paths."""

from fractions import Fraction
from math import comb

from kansoku.errors import InputError

__all__ = [
    "FIRST_PORT",
    "PORTS",
    "is_source_port",
    "label_of_port",
    "missing_probability",
    "port_of_label",
    "smallest_k",
]

FIRST_PORT = 49152
"""First UDP source port of RoCE v2 (0xC000)."""
PORTS = 16384
"""Number of RoCE v2 source ports."""


def is_source_port(port: int) -> bool:
    """Return whether RoCE sends from this UDP port; nobody may make an agent bind another."""
    return FIRST_PORT <= port < FIRST_PORT + PORTS


def port_of_label(label: int) -> int:
    """Return the UDP source port that a RoCE NIC derives from a 20-bit flow label."""
    if not 0 <= label < 1 << 20:
        raise InputError(f"flow label {label} is not a 20-bit number")
    return FIRST_PORT + ((label & 0x3FFF) ^ (label >> 14))


def label_of_port(port: int) -> int:
    """Return the smallest flow label that gives this source port (64 labels share each port)."""
    if not is_source_port(port):
        raise InputError(f"port {port} is not a RoCE source port (49152-65535)")
    return port - FIRST_PORT


def missing_probability(paths: int, k: int) -> Fraction:
    """Return the exact probability that k random tuples leave at least one of the paths unused.

    Inclusion-exclusion: sum over i of (-1)^(i+1) C(N,i) (1 - i/N)^k.
    """
    total = sum((-1) ** (i + 1) * comb(paths, i) * (paths - i) ** k for i in range(1, paths + 1))
    return Fraction(total, paths**k)


def smallest_k(paths: int, coverage: float = 0.99) -> int:
    """Return the smallest k >= N whose tuples cover all N paths with this probability.

    Integers throughout: the alternating sum cancels to nothing in floating point.
    """
    if paths < 1:
        raise InputError(f"{paths} parallel paths: there must be at least one")
    allowed = 1 - Fraction(str(coverage))
    low, high = paths, 2 * paths
    while missing_probability(paths, high) > allowed:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if missing_probability(paths, middle) <= allowed:
            high = middle
        else:
            low = middle + 1
    return low
