"""The windows in which a tenant may see metrics: its job's nodes while the job ran."""

from dataclasses import dataclass

import polars as pl
from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from kansoku.errors import InputError
from kansoku.store import LocalStore, Matcher, matcher_list

__all__ = ["JobWindow", "job_window"]

NODE_LABEL = "host.name"
MAX_NODES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWindow:
    """One job's nodes and time."""

    start_ns: int
    end_ns: int
    matchers: tuple[Matcher, ...]

    def clip(self, since_ns: int, until_ns: int) -> tuple[int, int]:
        """Return the part of a range that lies in the job's time."""
        return max(since_ns, self.start_ns), min(until_ns, self.end_ns)


def job_window(store: LocalStore, job: str, *, where: str, now_ns: int) -> JobWindow:
    """Return the window of a job that satisfies an SQL condition.

    Raises InputError where there is no such job, it has not begun, or its nodes were shared with
    other jobs: then node metrics are not its own.
    """
    rows = store.table("jobs", filters={"job_id": job}, where=where)
    rows = rows.filter(pl.col("start_ns").is_not_null() & pl.col("node_list").is_not_null())
    if rows.is_empty():
        raise InputError(f"no job {job!r} of yours that has begun")
    row = rows.sort("submit_ns").row(-1, named=True)
    end_ns = row["end_ns"] or now_ns
    nodes = _nodes(row["node_list"])
    others = store.table("jobs", filters=None).filter(
        (pl.col("job_id") != job)
        & (pl.col("start_ns") < end_ns)
        & (pl.col("end_ns").is_null() | (pl.col("end_ns") > row["start_ns"]))
        & pl.col("node_list").is_not_null()
    )
    for other in others["node_list"].unique().to_list():
        if nodes & _nodes(other):
            raise InputError(f"job {job} shared a node with other jobs: its metrics are not alone")
    return JobWindow(
        start_ns=row["start_ns"],
        end_ns=end_ns,
        matchers=matcher_list({NODE_LABEL: sorted(nodes)}),
    )


def _nodes(text: str) -> set[str]:
    try:
        found = NodeSet(text, resolver=None)
    except NodeSetParseError:
        return set()
    return set(found) if len(found) <= MAX_NODES else set()
