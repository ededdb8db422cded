"""Diagnose a folder: gather what every reader sees, then reason once."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.app.checkpoints import checkpoints_of_folder, checkpoints_of_run
from kansoku.app.diagnose._answer import Diagnosis
from kansoku.app.diagnose._runs import observe_dumps, observe_run
from kansoku.app.diagnose._topology import cluster_of, leaf_map
from kansoku.app.diagnose._traces import observe_traces
from kansoku.app.trace_hang import HangReport
from kansoku.catalog.signatures import Signature
from kansoku.diagnose.checkpoints import CheckpointState
from kansoku.diagnose.context import Context, Progress, Signs
from kansoku.diagnose.device_text import compare_facts, measures_of_facts
from kansoku.diagnose.edge.bundle import Bundle, read_bundle
from kansoku.diagnose.leaves import blame_leaves
from kansoku.diagnose.measures import against_plan, dated, read_measures, taken_on_the_node
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.reason import diagnose as reason
from kansoku.diagnose.stacks import outliers
from kansoku.errors import InputError

__all__ = ["diagnose_folder"]


def _missing(bundle: Bundle) -> list[str]:
    kinds = {
        "no kernel log: hardware faults cannot be confirmed": any(
            o.kind == "kernel" for o in bundle.reader.observations
        )
        or any("dmesg" in n or "kern" in n or "messages" in n for n in bundle.text_files),
        "no Flight Recorder dumps: which rank missed which collective is not known": bool(
            bundle.dumps or bundle.runs
        ),
        "no kansoku run: steps and phases are not known": bool(bundle.runs),
        "no metrics of nodes": bool(bundle.metrics),
        "no stacks of the ranks": bool(bundle.stacks),
        "no Slurm records": any("slurm" in n or "sacct" in n for n in bundle.text_files),
    }
    return [text for text, there in kinds.items() if not there] + bundle.skipped


def _read(bundle: Bundle, missing: Sequence[str]) -> tuple[str, ...]:
    """Return what was read, without what turned out not to be what its name says."""
    others = [str(path) for path in (*bundle.dumps, *bundle.traces, *bundle.runs)]
    refused = "\n".join(missing)
    return (*bundle.text_files, *(name for name in others if f"{name}: " not in refused))


def _whole(bundle: Bundle) -> frozenset[str]:
    """Return the nodes of a job whose every rank NCCL has named; empty otherwise."""
    world = max(bundle.rank_nodes, default=0)
    nodes = bundle.rank_nodes.get(world, {})
    return frozenset(nodes.values()) if world > 1 and len(nodes) == world else frozenset()


_OfDumps = tuple[list[Observation], HangReport | None, list[str]]


def _begin_dumps(
    bundle: Bundle, meanwhile: ThreadPoolExecutor, into: list[Future[_OfDumps]]
) -> None:
    """Read dumps (many of them in other processes) while the logs are read."""
    if bundle.dumps:
        into.append(meanwhile.submit(observe_dumps, bundle.dumps))


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """What the readers of a folder told so far."""

    found: list[Observation]
    missing: list[str]
    node_of_rank: dict[int, str]
    job_nodes: set[str]
    progress: dict[int | None, int]
    """The time of the last step, by rank."""
    endings: list[bool]
    """How each log, and each launcher, says that the job ended."""
    checkpoint: CheckpointState | None = None


def _take_run(run: Path, bundle: Bundle, gathered: _Gathered) -> None:
    """Take a kansoku run; one that cannot be read is named as missing."""
    try:
        planned = bundle.planned_step_s is not None
        seen, loaded, nodes, unplanned = observe_run(run, planned=planned)
    except InputError as error:
        gathered.missing.append(str(error))
        return
    gathered.found += seen
    gathered.missing += unplanned
    gathered.checkpoint = checkpoints_of_run(loaded) or gathered.checkpoint
    gathered.node_of_rank.update(nodes)
    gathered.job_nodes |= set(nodes.values())
    if loaded.facts.exit_code is not None:
        gathered.endings.append(loaded.facts.exit_code == 0)
    steps = loaded.steps
    if len(steps):
        ends = steps.group_by("rank").agg((pl.col("start_ns") + pl.col("duration_ns")).max())
        for rank, end in ends.iter_rows():
            if end is not None:
                gathered.progress[rank] = max(gathered.progress.get(rank, end), end)


def _of_numbers(bundle: Bundle) -> list[Observation]:
    """Return what the numbers of tables, logs and tools say, also against a plan."""
    numbers = [*bundle.numbers, measures_of_facts(bundle.facts)] if bundle.facts else bundle.numbers
    if not numbers:
        return []
    found = dated(read_measures(pl.concat(numbers)), bundle.step_clock)
    if bundle.planned_step_s is not None:
        found += against_plan(pl.concat(numbers), bundle.planned_step_s)
    return found


def _sample_times(bundle: Bundle, nodes: frozenset[str]) -> dict[str, list[int]]:
    """Return when numbers of nodes that a scheduler lost were taken on the nodes themselves."""
    parts = [frame.select("metric", "node", "time_ns") for frame in bundle.numbers if nodes]
    if not parts:
        return {}
    rows = pl.concat(parts).filter(pl.col("node").is_in(list(nodes))).drop_nulls("time_ns")
    own = [name for name in rows["metric"].unique() if taken_on_the_node(name)]
    times = rows.filter(pl.col("metric").is_in(own)).group_by("node").agg(
        pl.col("time_ns").unique().sort()
    )  # fmt: skip
    return dict(times.iter_rows())


def _signs(bundle: Bundle, found: Sequence[Observation]) -> Signs:
    """Return what shows that nodes live that a scheduler lost."""
    lost = frozenset(o.node for o in found if o.rule == "node-lost" and o.node)
    return Signs(
        ended_tasks=bundle.ended_tasks, went_on=bundle.went_on, daemons=bundle.daemons,
        samples=_sample_times(bundle, lost),
    )  # fmt: skip


def _context(bundle: Bundle, gathered: _Gathered) -> Context:
    """Return what is known beside the observations."""
    nodes = gathered.job_nodes | {o.node for o in gathered.found if o.node} | set(bundle.boots)
    ended = bundle.slurm_ended or gathered.endings
    return Context(
        job_nodes=frozenset(gathered.job_nodes) if bundle.job_nodes else _whole(bundle),
        nodes=frozenset(nodes),
        progress=Progress(last_ns=gathered.progress, first_ns=bundle.reader.first_progress_ns),
        ranks=frozenset(bundle.reader.ranks | set(gathered.node_of_rank)),
        node_of_rank=gathered.node_of_rank,
        ended_well=bool(ended) and all(ended),
        signs=_signs(bundle, gathered.found),
    )


def diagnose_folder(
    path: Path,
    *,
    extra: Sequence[Signature] = (),
    policy: Policy | None = None,
    more: Sequence[Observation] = (),
    cluster: str | None = None,
) -> Diagnosis:
    """Diagnose a folder of whatever there is; ``more`` are observations from other parts.

    ``cluster`` is a cluster file or a shipped name; else one in the folder is taken. Raises
    InputError where there is nothing to read.
    """
    leaves = leaf_map(cluster_of(path, cluster))
    with ThreadPoolExecutor(1) as meanwhile:
        of_dumps: list[Future[_OfDumps]] = []
        bundle = read_bundle(
            path,
            extra=extra,
            sorted_in=lambda sorted_in: _begin_dumps(sorted_in, meanwhile, of_dumps),
        )
    if not (bundle.text_files or bundle.dumps or bundle.traces or bundle.runs or more):
        why = "; ".join(bundle.skipped[:3]) or "it is empty"
        raise InputError(
            f"nothing in it that can be read: {why}",
            where=str(path),
            remedy="name a folder with logs, kernel logs, dumps, metrics, or a run",
        )
    reader = bundle.reader
    gathered = _Gathered(
        found=[*reader.observations, *more],
        missing=_missing(bundle),
        node_of_rank=dict(reader.node_of_rank),
        job_nodes=set(bundle.job_nodes),
        progress=dict(reader.last_progress_ns),
        endings=list(bundle.ended_well),
    )
    for run in bundle.runs:
        _take_run(run, bundle, gathered)
    for told in of_dumps:
        seen, _, unread = told.result()
        gathered.found += seen
        gathered.missing += unread
    seen, unread = observe_traces(bundle.traces)
    gathered.found += [*seen, *outliers(bundle.stacks), *compare_facts(bundle.facts)]
    gathered.missing += unread
    gathered.found += _of_numbers(bundle)
    context = _context(bundle, gathered)
    policy = policy or Policy()
    found = blame_leaves(gathered.found, leaves, context.nodes | context.job_nodes, policy)
    incident = reason(found, context, policy)
    kept = checkpoints_of_folder(path, until_ns=max(gathered.progress.values(), default=None))
    of_folder = kept.last is not None or kept.incomplete
    return Diagnosis(
        incidents=() if incident is None else (incident,),
        read=_read(bundle, gathered.missing),
        missing=tuple(dict.fromkeys(gathered.missing)),
        policy=policy,
        checkpoint=kept if of_folder else gathered.checkpoint,
    )
