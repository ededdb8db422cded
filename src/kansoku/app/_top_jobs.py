"""The jobs of a store as lines: what Slurm says of them, and how their runs go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from kansoku.app._late_rank import late_rank
from kansoku.app.peak import gpu_peak
from kansoku.formats.slurm import expand_nodes
from kansoku.model.mfu import live_mfu

__all__ = ["JobLine", "about_job", "job_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One running job, or one run that belongs to none."""

    key: str
    """Id of the job, or of the run."""
    run: str | None = None
    """Its newest run that sends steps; None where its training is not recorded."""
    ids: tuple[str, ...] = ()
    """Every way its id is written."""
    name: str = ""
    user: str = ""
    state: str = ""
    """Slurm's state in lower case; ``run`` for a run without a job."""
    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    gpu_kind: str | None = None
    start_ns: int | None = None
    ranks: int = 0
    step: int | None = None
    step_ms: float | None = None
    """Median over its ranks of their median step."""
    mfu_ratio: float | None = None
    late: int | None = None
    """The rank that the others wait for."""
    incidents: int = 0
    """Open ones about it, or about its nodes since it began."""


def job_lines(
    jobs: pl.DataFrame,
    ranks: pl.DataFrame,
    job_of: Mapping[str, str],
    incidents: Sequence[Mapping[str, object]],
) -> tuple[JobLine, ...]:
    """Return a line per running job, then one per run that no such job owns.

    ``jobs`` are rows of the jobs table, ``ranks`` the answer of ``rank_phases`` over the newest
    minute, ``job_of`` maps a run to the id of its job, ``incidents`` are the open ones.
    """
    runs = {str(run): rows for (run,), rows in ranks.group_by("run", maintain_order=True)}
    newest = {run: max(rows["last_ns"].to_list()) for run, rows in runs.items()}
    lines, taken = [], set[str]()
    for row in jobs.unique("job_id", keep="first", maintain_order=True).iter_rows(named=True):
        ids = tuple(dict.fromkeys((str(row["job_id"]), str(row["raw_id"]))))
        mine = [run for run in runs if job_of.get(run) in ids]
        taken.update(mine)
        line = JobLine(
            key=ids[0],
            ids=ids,
            name=row["name"] or "",
            user=row["user"] or "",
            state=(row["state"] or "unknown").lower().replace("_", " "),
            nodes=_nodes(row["node_list"]),
            gpus=row["gpus"],
            gpu_kind=row["gpu_kind"],
            start_ns=row["start_ns"],
        )
        if mine:
            line = _with_training(line, max(mine, key=newest.__getitem__), runs)
        lines.append(line)
    # Several runs of a job that Slurm no longer lists are one line: the newest.
    strays = {
        job_of.get(run) or run: run for run in sorted(runs.keys() - taken, key=newest.__getitem__)
    }
    for run in runs:
        key = job_of.get(run) or run
        if strays.get(key) == run:
            lines.append(_with_training(JobLine(key=key, ids=(key, run), state="run"), run, runs))
    return tuple(
        replace(line, incidents=sum(about_job(line, one) for one in incidents)) for line in lines
    )


def about_job(line: JobLine, incident: Mapping[str, object]) -> bool:
    """Return whether an incident is about a job, or about its nodes while it ran there."""
    kind, _, rest = str(incident["subject"] or "").partition(":")
    if kind == "job":
        return rest in line.ids or rest == line.run
    onset = incident["onset_ns"]
    began = line.start_ns is None or not isinstance(onset, int) or onset >= line.start_ns
    return kind in {"node", "gpu", "nic"} and rest.partition("/")[0] in line.nodes and began


def _nodes(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(expand_nodes(text)) if text else ()
    except ValueError:
        return ()


def _with_training(line: JobLine, run: str, runs: Mapping[str, pl.DataFrame]) -> JobLine:
    """Add what the newest minute of a run says: columns of ``rank_phases``."""
    known = runs[run].filter(pl.col("step_p50_ns").is_not_null() & pl.col("rank").is_not_null())
    if known.is_empty():
        return replace(line, run=run)
    times = sorted(float(ns) / 1e6 for ns in known["step_p50_ns"].to_list())
    waits = {
        int(rank): wait / step if step else 0.0
        for rank, wait, step in known.select(
            "rank", pl.col("collective_p50_ns").fill_null(0), "step_p50_ns"
        ).iter_rows()
    }
    flops = known["flops"].to_list()
    peak = gpu_peak(line.gpu_kind)
    mfu = None
    # A sum over some of the ranks only would be too low.
    if peak is not None and None not in flops:
        mfu = live_mfu(sum(flops), times[-1] / 1e3, peak * len(flops))
    return replace(
        line,
        run=run,
        ranks=len(times),
        step=max(known["last_step"].to_list()),
        step_ms=times[len(times) // 2],
        mfu_ratio=mfu,
        late=late_rank(waits),
    )
