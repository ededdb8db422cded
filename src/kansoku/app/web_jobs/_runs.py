"""The runs that a reader may see, from the store's tables and from run folders beside them.

A run folder lies in ``STORE/runs/`` (copied, linked, or written there by ``kansoku run --out``): it
has every span of every step. What agents send has every step row and the spans of sampled steps.
Where both are there, the folder is read.
"""

import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TypeVar

import polars as pl

from kansoku.app._run_clocks import aligned_arrivals
from kansoku.app.peak import gpu_name
from kansoku.app.report import LoadedRun, Report, load_run, report
from kansoku.app.serve.access import hide_inside
from kansoku.app.web_page import Columns, MissingError, Parameter
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.formats.slurm import expand_nodes
from kansoku.model import RankFacts, RunFacts
from kansoku.trace.collectives import collective_rows
from kansoku.trace.layout import read_layout

__all__ = [
    "RUN_ID",
    "RUN_PARAMETER",
    "KnownRun",
    "kept",
    "known_runs",
    "load",
    "loaded_report",
    "need_run",
    "nodes_of",
    "windowed",
]

RUN_ID = r"[A-Za-z0-9_@+\-][A-Za-z0-9_.@+:\-]{0,199}"
RUN_PARAMETER = Parameter(name="run", meaning="id of the run", in_path=True, pattern=RUN_ID)
_MOST_FOLDERS = 2000
_MOST_SPANS = 1_000_000
_CACHED = 2
_FILE_BYTES = 4 << 20
_SCREEN_BYTES = 300_000
"""What a page's blocks weigh, roughly."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """One run in a list."""

    run: str
    job: str | None
    """Id of its Slurm job."""
    ranks: int | None
    first_step: int | None
    last_step: int | None
    start_ns: int | None
    end_ns: int | None
    step_p50_ns: int | None
    tokens: float | None
    folder: Path | None
    """Its folder beside the store; None where only rows came."""

    @property
    def steps(self) -> int | None:
        """Return how many steps it took, as far as rows came."""
        if self.first_step is None or self.last_step is None:
            return None
        return self.last_step - self.first_step + 1

    def to_json(self) -> dict[str, object]:
        """Return it for the JSON twin."""
        return {
            "run": self.run,
            "job": self.job,
            "ranks": self.ranks,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "step_p50_ns": self.step_p50_ns,
            "source": "rows" if self.folder is None else "folder",
        }


def known_runs(reading: Reading) -> tuple[KnownRun, ...]:
    """Return the runs that the reader may see, newest first."""
    if "runs" not in reading.asked:
        reading.asked["runs"] = _known(reading)
    found: tuple[KnownRun, ...] = reading.asked["runs"]
    return found


def _known(reading: Reading) -> tuple[KnownRun, ...]:
    owner = {row[0]: row[1] for row in reading.store.owners()}
    folders = _folders(reading.folder / "runs")
    found = [
        KnownRun(
            run=row["run"],
            job=owner.get(row["run"]) or _job_of(folders.get(row["run"])),
            ranks=row["ranks"],
            first_step=row["first_step"],
            last_step=row["last_step"],
            start_ns=row["start_ns"],
            end_ns=row["end_ns"],
            step_p50_ns=row["step_p50_ns"],
            tokens=row["tokens"],
            folder=folders[row["run"]][0] if row["run"] in folders else None,
        )
        for row in reading.query("runs").iter_rows(named=True)
        if row["run"]
    ]
    rows = {one.run for one in found}
    own = None if reading.sees_all else set(reading.jobs()["job_id"].to_list())
    for run, (path, facts) in folders.items():
        job = _job_of((path, facts)) or owner.get(run)
        if run in rows or (own is not None and job not in own):
            continue
        found.append(
            KnownRun(
                run=run,
                job=job,
                ranks=len(ranks) if isinstance(ranks := facts.get("ranks"), list) else None,
                first_step=None,
                last_step=None,
                start_ns=_whole(facts.get("start_ns")),
                end_ns=_whole(facts.get("end_ns")),
                step_p50_ns=None,
                tokens=None,
                folder=path,
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.start_ns or 0)))


def _job_of(folder: tuple[Path, dict[str, object]] | None) -> str | None:
    """Return the job that a run's folder names."""
    return str(folder[1]["slurm_job"]) if folder and folder[1].get("slurm_job") else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _folders(root: Path) -> dict[str, tuple[Path, dict[str, object]]]:
    """Return run id to its folder and run.json."""
    found: dict[str, tuple[Path, dict[str, object]]] = {}
    for file in sorted(root.glob("*/run.json"))[:_MOST_FOLDERS]:
        try:
            status = file.stat()
            if status.st_size > _FILE_BYTES:
                continue
            facts = _facts_of(file, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(facts, dict) and isinstance(facts.get("run"), str) and facts["run"]:
            found[facts["run"]] = (file.parent, facts)
    return found


@lru_cache(maxsize=64)
def _facts_of(file: Path, mtime_ns: int, size: int) -> object:
    """Return a run.json as it was then: that of a thousand ranks takes a while to read."""
    del mtime_ns, size
    return json.loads(file.read_text(encoding="utf-8"))


def need_run(reading: Reading, run: str) -> KnownRun:
    """Return a run by id or name of its folder; raise MissingError where the reader sees none."""
    known = known_runs(reading)
    for one in known:
        if one.run == run:
            return one
    # ``kansoku run --out STORE/runs/NAME``: the name is what its owner remembers.
    for one in known:
        if one.folder is not None and one.folder.name == run:
            return one
    raise MissingError(f"no run {run!r} is known here", remedy="see the runs on the jobs page")


# Loading

_cache: OrderedDict[Hashable, tuple[LoadedRun, Report | None]] = OrderedDict()
_lock = Lock()


def _signature(reading: Reading, known: KnownRun) -> Hashable:
    """Return what changes when the run has more to say."""
    who = reading.principal
    rights = (who.role, who.name)
    if known.folder is not None:
        files = sorted(
            (str(p), p.stat().st_mtime_ns, p.stat().st_size)
            for p in known.folder.rglob("*")
            if p.is_file()
        )
        return (str(reading.folder), known.run, rights, tuple(files))
    rows = (known.start_ns, known.end_ns, known.last_step, known.ranks, known.tokens)
    return (str(reading.folder), known.run, rights, rows)


def load(reading: Reading, run: str) -> LoadedRun:
    """Return a run in tables; raise MissingError or InputError."""
    return _loaded(reading, run)[0]


def loaded_report(reading: Reading, run: str) -> Report:
    """Return the report of a run, kept until the run has more to say."""
    key, (loaded, answer) = _entry(reading, run)
    if answer is None:
        answer = report(loaded)
        with _lock:
            _cache[key] = (loaded, answer)
    return answer


def _loaded(reading: Reading, run: str) -> tuple[LoadedRun, Report | None]:
    return _entry(reading, run)[1]


def kept(reading: Reading, run: str, what: Hashable, make: Callable[[LoadedRun], T]) -> T:
    """Return what pages draw of a run, made once until the run has more to say."""
    key, (loaded, _) = _entry(reading, run)

    def weighed(_: T | None) -> tuple[T, int]:
        made = make(loaded)
        arrays = made.arrays.values() if isinstance(made, Columns) else ()
        return made, sum(one.nbytes for one in arrays) or _SCREEN_BYTES

    return reading.memory.get((key, what), math.inf, weighed)


def _entry(reading: Reading, run: str) -> tuple[Hashable, tuple[LoadedRun, Report | None]]:
    known = need_run(reading, run)
    key: Hashable = reading.asked.get(("signature", run)) or _signature(reading, known)
    reading.asked["signature", run] = key
    with _lock:
        kept = _cache.get(key)
        if kept is not None:
            _cache.move_to_end(key)
            return key, kept
    if known.folder is not None:
        loaded = _shown(reading, load_run(known.folder))
    else:
        loaded = _from_rows(reading, known)
    with _lock:
        _cache[key] = (loaded, None)
        while len(_cache) > _CACHED:
            _cache.popitem(last=False)
    return key, (loaded, None)


def _shown(reading: Reading, loaded: LoadedRun) -> LoadedRun:
    """Hide the inside of a run whose user did not consent, as the API does."""
    if reading.principal.role != "operator":
        return loaded
    consents = {row[0]: row[4] for row in reading.store.owners()}
    spans = hide_inside(loaded.spans, reading.principal, consents)
    if consents.get(loaded.facts.run):
        return loaded
    return replace(loaded, spans=spans, facts=replace(loaded.facts, command=()))


def _from_rows(reading: Reading, known: KnownRun) -> LoadedRun:
    """Build a run from the rows that agents sent."""
    only = {"run": known.run}
    steps = reading.table("steps", filters=only)
    spans = reading.table("spans", filters=only, limit=_MOST_SPANS)
    if steps.is_empty() and spans.is_empty():
        raise InputError(f"run {known.run!r} has no rows")
    nodes = nodes_of(spans)
    stayed = "command, groups" if nodes else "command, node, groups"
    missing = [
        "Rows sent by agents: spans are of sampled and slow steps only.",
        f"What processes said of themselves ({stayed}) stayed in the run's folder.",
    ]
    facts = _facts(reading, known, steps, nodes, missing)
    if "run_delay_ns" not in steps.columns:
        steps = steps.with_columns(run_delay_ns=pl.lit(None, dtype=pl.Int64))
    rows = collective_rows(spans, facts)
    # A job on one node has one clock, also where its ranks' sampled spans have not come yet.
    alone = facts.nodes[0] if len(facts.nodes) == 1 else None
    if alone is not None:
        nodes = {r.rank: alone for r in facts.ranks if r.rank is not None}
    matched, clocks = aligned_arrivals(rows, nodes)
    return LoadedRun(
        path=reading.folder,
        facts=facts,
        spans=spans,
        steps=steps.sort("rank", "step"),
        collectives=rows,
        arrivals=matched,
        clocks=clocks,
        layout=read_layout(facts, spans),
        missing=tuple(missing),
    )


def nodes_of(spans: pl.DataFrame) -> dict[int, str]:
    """Return the node of each rank whose agent told it with a sampled step."""
    told = spans.filter(pl.col("kind") == "step", pl.col("rank").is_not_null()).select(
        "rank", node=pl.col("attributes").str.json_path_match("$.node")
    )
    return dict(told.drop_nulls().iter_rows())


def _facts(
    reading: Reading,
    known: KnownRun,
    steps: pl.DataFrame,
    node_of: Mapping[int, str],
    missing: list[str],
) -> RunFacts:
    job = _job_row(reading, known.job)
    ranks = sorted(steps["rank"].drop_nulls().unique().to_list())
    nodes = tuple(sorted(set(node_of.values()))) if set(ranks) <= node_of.keys() else ()
    if job is not None and job["node_list"]:
        with contextlib.suppress(ValueError):
            nodes = tuple(expand_nodes(str(job["node_list"])))
    device = _device(reading, job, nodes)
    if device is None:
        missing.append("The GPUs are not known: name their kind in the cluster file for MFU.")
    return RunFacts(
        run=known.run,
        command=(),
        start_ns=known.start_ns or 0,
        end_ns=None,
        exit_code=None,
        slurm_job=known.job,
        nodes=nodes,
        ranks=tuple(
            RankFacts(
                rank=rank,
                local_rank=None,
                world_size=len(ranks),
                node=node_of.get(rank, ""),
                pid=0,
                device=device,
                torch_version=None,
                python_version=None,
            )
            for rank in ranks
        ),
    )


def _job_row(reading: Reading, job: str | None) -> Mapping[str, object] | None:
    if job is None:
        return None
    found = reading.jobs().filter(
        (pl.col("job_id") == job) | (pl.col("raw_id").cast(pl.String) == job)
    )
    return found.row(0, named=True) if len(found) else None


def _device(reading: Reading, job: Mapping[str, object] | None, nodes: Sequence[str]) -> str | None:
    """Return the GPU's name: what the job asked for, or what its nodes hold."""
    kinds = [str(job["gpu_kind"])] if job is not None and job["gpu_kind"] else []
    if reading.cluster is not None:
        wanted = set(nodes)
        held = {n.kind.gpu for n in reading.cluster.nodes if not wanted or n.name in wanted}
        kinds += [str(one) for one in held] if len(held) == 1 else []
    return next((name for kind in kinds if (name := gpu_name(kind)) is not None), None)


def windowed(loaded: LoadedRun, from_step: int | None, to_step: int | None) -> LoadedRun:
    """Return the run cut to steps from … to, both included; raise InputError where none is left."""
    if from_step is None and to_step is None:
        return loaded
    low = from_step if from_step is not None else -(2**31)
    high = to_step if to_step is not None else 2**31 - 1
    inside = pl.col("step").is_between(low, high)
    steps = loaded.steps.filter(inside)
    if steps.is_empty():
        known = loaded.steps["step"].unique().sort().to_list()
        raise InputError(
            f"run {loaded.facts.run!r} has no step in {low}-{high}",
            remedy=f"its steps are {known[0]}-{known[-1]}" if known else "it has none",
        )
    return replace(
        loaded,
        steps=steps,
        spans=loaded.spans.filter(inside),
        collectives=loaded.collectives.filter(inside),
        arrivals=loaded.arrivals.filter(inside),
        resources=None if loaded.resources is None else loaded.resources.filter(inside),
        use=None,
    )
