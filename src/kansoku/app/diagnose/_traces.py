"""What Kineto traces in a folder say: the rank that the others wait for."""

from collections.abc import Sequence
from pathlib import Path

from kansoku.app._trace_stragglers import stragglers
from kansoku.diagnose.observation import Observation
from kansoku.errors import InputError
from kansoku.model import Domain

__all__ = ["observe_traces"]

# A rank comes last somewhere by chance; this much of all waiting is not chance.
_LEAST_SHARE = 0.4
_LEAST_CONFIDENCE = 0.95
_MOST_TRACES = 64
"""Traces hold up to a gigabyte each; the ranks of a group show who is late."""


def observe_traces(traces: Sequence[Path]) -> tuple[list[Observation], list[str]]:
    """Return the stragglers of Kineto traces, and what could not be told from them.

    A late rank says where, hardly why: it supports what else is known of that rank or its node.
    """
    if len(traces) < 2:
        return [], ["one Kineto trace: ranks cannot be compared"] if traces else []
    remarks = []
    if len(traces) > _MOST_TRACES:
        remarks.append(f"{len(traces)} Kineto traces: the first {_MOST_TRACES} were read")
    try:
        told = stragglers([*sorted(traces)[:_MOST_TRACES]])
    except InputError as error:
        return [], [*remarks, f"Kineto traces: {error}"]
    if told.report.verdict == "unknown":
        return [], [*remarks, f"Kineto traces: {told.report.reason}"]
    return [
        Observation(
            rule="finding.straggler",
            text=f"rank {one.rank} is last at {one.last_count} of {one.collectives} collectives, "
            f"{one.lateness_ns / 1e6:.3f} ms late: {one.share:.0%} of all waiting is for it",
            source=f"{len(traces)} Kineto traces",
            kind="trace",
            domain=Domain.HOST,
            component="slow rank",
            role="either",
            strength=0.6 * one.confidence,
            meaning="the others wait for this rank",
            action="look at its node, its device and its share of the work",
            rank=one.rank,
            locates=True,
        )
        for one in told.report.stragglers
        if one.share >= _LEAST_SHARE and one.confidence >= _LEAST_CONFIDENCE
    ], [*remarks, *told.remarks[:4]]
