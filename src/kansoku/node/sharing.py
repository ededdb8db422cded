"""A device that several jobs used at the same time: split, or refused, never counted twice.

Beside the samples stands how many ranks of other jobs were on a device (quantity
``other_ranks``). What a counter grew by while there were some is split equally among all ranks;
while their number is unknown it is nobody's, and a span that touches such a time has null.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from kansoku.node.curves import Curve, Floats, Ints

if TYPE_CHECKING:
    import numpy as np
else:
    from kansoku.node import later_numpy as np

__all__ = ["NODE", "OTHER_RANKS", "Claim", "Others", "other_ranks", "others_of"]

NODE = "node"
"""Device name of what all ranks of a node have in common: CPU energy, NICs."""
OTHER_RANKS = "other_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job's ranks on a device over a time."""

    run: str
    device: str
    """``node``, ``gpu3``; ``gpu`` where it is not known which."""
    ranks: int
    start_ns: int
    end_ns: int | None
    """None while they run."""


@dataclass(frozen=True, slots=True)
class Others:
    """How many ranks of other jobs were on a device; NaN where their number is unknown."""

    times: Ints
    ranks: Floats

    @property
    def any(self) -> bool:
        """Whether there ever was one."""
        return bool((~(self.ranks == 0)).any())

    def between(self, edges: Ints) -> Floats:
        """Return the most there can have been between each edge and the next."""
        last = len(self.times) - 1
        before = np.searchsorted(self.times, edges[:-1], side="right") - 1
        after = np.searchsorted(self.times, edges[1:], side="left")
        return np.maximum(self.ranks[np.clip(before, 0, last)], self.ranks[np.clip(after, 0, last)])

    def split(self, curve: Curve, own: float) -> Curve:
        """Return the part of a counter that falls to ``own`` ranks."""
        edges, growth, others = self._pieces(curve)
        share = np.where(np.isnan(others), 0.0, own / (own + np.nan_to_num(others)))
        values = np.concatenate([[0.0], np.cumsum(growth * share)])
        return Curve(edges, values, gaps=_gaps(edges, np.isnan(others)))

    def alone(self, curve: Curve) -> Curve:
        """Return a counter that is known only while no other job was there: activity."""
        edges, growth, others = self._pieces(curve)
        values = np.concatenate([[0.0], np.cumsum(growth)])
        return Curve(edges, values, gaps=_gaps(edges, ~(others == 0)))

    def _pieces(self, curve: Curve) -> tuple[Ints, Floats, Floats]:
        inside = self.times[(self.times > curve.times[0]) & (self.times < curve.times[-1])]
        edges = np.union1d(curve.times, inside)
        return edges, np.diff(curve.at(edges)), self.between(edges)


def _gaps(edges: Ints, unknown: "np.ndarray") -> tuple[Ints, Ints]:
    return edges[:-1][unknown], edges[1:][unknown]


def others_of(samples: pl.DataFrame) -> dict[tuple[str, str], Others]:
    """Return what the samples say of other jobs: (node, device) to counts over time."""
    rows = samples.filter(pl.col("quantity") == OTHER_RANKS).sort("time_ns", maintain_order=True)
    return {
        (str(node), str(device)): Others(
            own["time_ns"].to_numpy(), own["value"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        )
        for (node, device), own in rows.group_by("node", "device", maintain_order=True)
    }


def other_ranks(
    claims: Iterable[Claim], *, run: str, devices: Iterable[str]
) -> list[tuple[str, int, float | None]]:
    """Return ``device, time_ns, ranks`` of the jobs other than ``run``: where the number changes.

    A job whose GPU is not known may be on any: the number there is None while it runs.
    """
    others = [claim for claim in claims if claim.run != run]
    rows: list[tuple[str, int, float | None]] = []
    for device in devices:
        here = [c for c in others if c.device == device]
        lost = [c for c in others if c.device == "gpu"] if device.startswith("gpu") else []
        edges = {c.start_ns for c in [*here, *lost]}
        edges |= {c.end_ns for c in [*here, *lost] if c.end_ns is not None}
        for edge in sorted(edges):
            for moment in (edge - 1, edge):  # two rows with one stamp: until then, and from then on
                unknown = any(_holds(c, moment) for c in lost)
                count = float(sum(c.ranks for c in here if _holds(c, moment)))
                rows.append((device, edge, None if unknown else count))
    return rows


def _holds(claim: Claim, moment: int) -> bool:
    return claim.start_ns <= moment and (claim.end_ns is None or moment < claim.end_ns)
