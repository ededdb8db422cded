"""The clocks of a run of ours, by one rule for every command: ranks of one host share a clock."""

import polars as pl

from kansoku.trace.clocks import ClockModel, estimate_clocks
from kansoku.trace.collectives import arrivals

__all__ = ["aligned_arrivals"]


def aligned_arrivals(rows: pl.DataFrame, nodes: dict[int, str]) -> tuple[pl.DataFrame, ClockModel]:
    """Return who came when, on one clock, and the clocks of the hosts that this rests on.

    ``rows`` is what :func:`kansoku.trace.collectives.collective_rows` returns, ``nodes`` the host
    of each rank.
    """
    matched = arrivals(rows)
    clocks = estimate_clocks(matched, nodes=nodes)
    if clocks.applied:
        del matched  # millions of rows: never two of them at once
        matched = arrivals(rows, clocks)
    return matched, clocks
