"""Diagnose the live store, or one Slurm job in it: events, findings, steps and numbers."""

from collections.abc import Iterable
from dataclasses import replace

import polars as pl
from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from kansoku.app.diagnose._answer import Diagnosis
from kansoku.app.diagnose._runs import straggler_observation
from kansoku.app.diagnose._topology import cluster_of, leaf_map
from kansoku.catalog.quantities import quantity_of
from kansoku.diagnose.context import Context, Progress
from kansoku.diagnose.leaves import blame_leaves
from kansoku.diagnose.live import Detector
from kansoku.diagnose.measures import read_measures
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.reason import diagnose as reason
from kansoku.diagnose.tables import measures_of_table
from kansoku.errors import InputError
from kansoku.store import Store
from kansoku.trace.stragglers import find_stragglers

__all__ = ["diagnose_store"]

_SECOND = 1_000_000_000
_BINS = 120
_MOST_METRICS = 400


def _nodes(text: str | None) -> frozenset[str]:
    try:
        return frozenset(NodeSet(text or "", resolver=None))
    except NodeSetParseError:
        return frozenset()


def _job(store: Store, job: str) -> dict[str, object]:
    rows = store.table("jobs").filter(pl.col("job_id") == job).sort("submit_ns")
    if rows.is_empty():
        raise InputError(
            f"the store has no job {job}", remedy="import it: kansoku jobs import, or name a folder"
        )
    return rows.row(-1, named=True)


def _from_rows(store: Store, since_ns: int, until_ns: int) -> list[Observation]:
    """Return what events and findings say, by the same readers as live diagnosis."""
    detector = Detector()
    seen: dict[tuple[object, ...], Observation] = {}
    for table, read in (("events", detector.events), ("findings", detector.findings)):
        rows = store.table(table, since_ns, until_ns)
        if rows.is_empty():
            continue
        for change in read(rows, until_ns):
            for one in change.observations:
                key = (one.rule, one.node, one.rank, one.device, one.target)
                known = seen.get(key)
                first = min(
                    filter(None, (one.time_ns, known.time_ns if known else None)), default=None
                )
                seen[key] = replace(one, time_ns=first)
    return list(seen.values())


def _from_steps(
    store: Store, since_ns: int, until_ns: int
) -> tuple[list[Observation], dict[int | None, int]]:
    steps = store.table("steps", since_ns, until_ns)
    found: list[Observation] = []
    progress: dict[int | None, int] = {}
    for _, rows in steps.group_by("run", maintain_order=True):
        ends = rows.select((pl.col("start_ns") + pl.col("duration_ns")).max()).item()
        if ends is not None:
            progress[None] = max(progress.get(None, 0), ends)
        ranks = tuple(sorted(rows["rank"].drop_nulls().unique().to_list()))
        timed = rows.with_columns(run_delay_ns=pl.lit(None, pl.Int64))
        found += [
            straggler_observation(one, gpu=False, node=None, time_ns=None)
            for one in find_stragglers(timed, {0: ranks}).stragglers
        ]
        detector = Detector()
        for change in detector.steps(rows.sort("step", "rank"), ends or until_ns):
            found += [o for o in change.observations if o.rule == "finding.slow"]
    return found, progress


def _metrics(store: Store, since_ns: int, until_ns: int) -> list[Observation]:
    names = [
        name
        for name in store.series().get_column("metric").unique().sort().to_list()
        if (q := quantity_of(name)) is None or q.test != "none"
    ]
    step = max((until_ns - since_ns) // _BINS, _SECOND)
    parts: list[pl.DataFrame] = []
    for name in names[:_MOST_METRICS]:
        rows = store.metric_range(name, start_ns=since_ns, end_ns=until_ns, step_ns=step)
        if rows.is_empty():
            continue
        parts.append(measures_of_table(rows.with_columns(metric=pl.lit(name)).lazy()))
    return read_measures(pl.concat(parts)) if parts else []


def _answering_switches(store: Store, since_ns: int, until_ns: int) -> dict[str, bool]:
    """Return whether the switches that agents ask answered all that time."""
    rows = store.metric_range(
        "kansoku.switch.reachable", start_ns=since_ns, end_ns=until_ns,
        step_ns=max((until_ns - since_ns) // _BINS, _SECOND), aggregate="min",
    )  # fmt: skip
    named = rows.with_columns(
        name=pl.col("labels").str.json_path_match('$["kansoku.switch"]')
    ).drop_nulls(["name", "value"])
    least = named.group_by("name").agg(pl.col("value").min())
    return {name: value > 0 for name, value in least.iter_rows()}


def _of_nodes(seen: Iterable[Observation], nodes: frozenset[str]) -> list[Observation]:
    """Keep what is on the job's nodes, or on no node; other nodes are the peers."""
    return [o for o in seen if not nodes or o.node is None or o.node in nodes]


def diagnose_store(
    store: Store,
    *,
    since_ns: int,
    until_ns: int,
    job: str | None = None,
    policy: Policy | None = None,
    cluster: str | None = None,
) -> Diagnosis:
    """Diagnose what the store holds of a time, or of one Slurm job; raise InputError without it.

    ``cluster``, a cluster file or a shipped name, says which leaf switch the NICs hang on.
    """
    leaves = leaf_map(cluster_of(None, cluster))
    nodes: frozenset[str] = frozenset()
    ended_well = False
    missing: list[str] = []
    if job is not None:
        row = _job(store, job)
        nodes = _nodes(str(row["node_list"] or ""))
        since_ns = int(row["start_ns"] or row["submit_ns"])  # type: ignore[call-overload]
        until_ns = int(row["end_ns"] or until_ns) + 60 * _SECOND  # type: ignore[call-overload]
        ended_well = row["state"] == "COMPLETED"
        if not nodes:
            missing.append(f"the nodes of job {job} are not known")
    found = _from_rows(store, since_ns, until_ns)
    steps, progress = _from_steps(store, since_ns, until_ns)
    found += [*steps, *_metrics(store, since_ns, until_ns)]
    if not progress:
        missing.append("no steps of that time: which rank was slow is not known")
    context = Context(progress=Progress(last_ns=progress), job_nodes=nodes, ended_well=ended_well)
    policy = policy or Policy()
    known = nodes | {one.node for one in found if one.node}
    found = blame_leaves(
        found, leaves, known, policy, answers=_answering_switches(store, since_ns, until_ns)
    )
    incident = reason(_of_nodes(found, nodes), context, policy)
    tables = ("events", "findings", "steps", "metrics", "jobs")
    return Diagnosis(
        incidents=() if incident is None else (incident,),
        read=tuple(f"store: {name}" for name in tables),
        missing=tuple(missing),
        policy=policy,
    )
