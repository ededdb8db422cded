"""The table that every benchmark prints."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure."""

    what: str
    measured: float
    unit: str
    target: str
    """As in ``≤ 0.5`` or ``≥ 20``; empty where there is none."""
    peer: str = ""
    """The named peer and its figure in the same run."""
    met: bool | None = None


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows with their targets; a missed target is marked, not hidden."""
    print(title)
    print(f"  {'what':<58} {'measured':>14}  {'unit':<12} {'target':<14} peer in the same run")
    for row in rows:
        mark = {True: "ok", False: "MISSED", None: ""}[row.met]
        figure = f"{row.measured:,.4g}"
        print(f"  {row.what:<58} {figure:>14}  {row.unit:<12} {row.target:<14} {row.peer} {mark}")
