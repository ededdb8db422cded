"""Why a job hangs: from dumps of its ranks to the ranks at fault."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from kansoku.app._trace_paths import readable_paths
from kansoku.errors import InputError
from kansoku.formats.flight_recorder import rank_in_name, read_dump
from kansoku.formats.nccl_communicators import Communicator, read_communicators, sniff
from kansoku.formats.run_directory import read_run
from kansoku.model import RunFacts, Verdict
from kansoku.trace.hang.analyse import HangVerdict, analyse_hang
from kansoku.trace.hang.communicators import (
    advanced,
    join_communicators,
    states_of_communicators,
)
from kansoku.trace.hang.flight_recorder import state_of_dump
from kansoku.trace.hang.record import RankState
from kansoku.trace.hang.spans import states_of_spans
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = ["HangReport", "hang", "hang_json", "hang_view"]

SCHEMA = "kansoku.trace.hang/1"
# Below this a second process costs more than it saves.
_FILES_WORTH_A_POOL = 400
_CHUNK = 100
_HEAD_BYTES = 65536
_BLAMED = {"missing_ranks", "mismatch", "cycle", "device_or_fabric"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """The verdict, the ranks' states behind it, and files that could not be read."""

    verdict: HangVerdict
    states: tuple[RankState, ...]
    unreadable: tuple[str, ...]

    def frame(self) -> pl.DataFrame:
        """Return one row per rank and group: how far it got."""
        rows = [
            (state.rank, name, status.enqueued, status.completed, state.file)
            for state in self.states
            for name, status in state.status.items()
        ]
        columns = ["rank", "group", "enqueued", "completed", "file"]
        return pl.DataFrame(rows, schema=columns, orient="row")


def _read_one(path: str) -> RankState | str:
    file = Path(path)
    rank = rank_in_name(file)
    try:
        dump = read_dump(file)
    except InputError as error:
        return str(error)
    if rank is None:
        own = dump.get("rank")
        if not isinstance(own, int):
            return f"{path}: no rank in the file's name or content (name it …_rank_N)"
        rank = own
    return state_of_dump(dump, rank=rank, file=path)


def _read_many(paths: Sequence[str]) -> list[RankState | str]:
    return [_read_one(path) for path in paths]


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in readable_paths(paths):
        if path.is_dir():
            files += sorted(
                p
                for p in path.rglob("*")
                if p.is_file() and (rank_in_name(p) is not None or _is_ncclish(p))
            )
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(
                "a pipe can be read once only: write the dump to a file", where=str(path)
            )
    if not files:
        raise InputError(
            "no dumps found",
            where=", ".join(map(str, paths)),
            remedy="names end in the rank: nccl_trace_rank_3, _dump_3",
        )
    return files


def _is_ncclish(path: Path) -> bool:
    """Return whether a file is a RAS report or an NCCL log, by its first bytes."""
    try:
        with path.open("rb") as stream:
            first = stream.read(1)
            return first != b"\x80" and sniff(first + stream.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def _of_nccl(files: Sequence[Path]) -> tuple[list[RankState], list[str], bool | None]:
    """Return the states that NCCL's own reports tell, remarks, and whether counts advance.

    Several snapshots of RAS are one job in time: the last one counts. Logs are joined.
    """
    snapshots: list[list[Communicator]] = []
    logs: list[Communicator] = []
    broken: list[str] = []
    for file in sorted(files, key=lambda one: (one.stat().st_mtime_ns, one.name)):
        try:
            found = read_communicators(file) or []
        except InputError as error:
            broken.append(str(error))
            continue
        if any(member.launches for one in found for member in one.members):
            logs += found
        elif any(one.others_launched is not None for one in found) or file.suffix == ".json":
            snapshots.append(found)
        else:
            logs += found
    moving = None
    if len(snapshots) > 1:
        moving = any(advanced(snapshots[0], later) for later in snapshots[1:])
    parts = [*(snapshots[-1] if snapshots else []), *logs]
    states, remarks = states_of_communicators(
        join_communicators(parts), file=", ".join(str(file) for file in files[:3])
    )
    return states, [*broken, *remarks], moving


def _judge_counts(verdict: HangVerdict, *, moving: bool | None) -> HangVerdict:
    """Say what counts of launches can and cannot tell."""
    if moving:
        return replace(
            verdict,
            verdict="none",
            culprits=(),
            reason="the counts advance between the snapshots: the job is not hanging, ranks that "
            "stay behind are stragglers",
        )
    if verdict.verdict == "none":
        return replace(
            verdict,
            verdict="unknown",
            reason="every rank has launched the same operations: nobody is missing, but counts do "
            "not tell whether the last one ended",
        )
    return verdict


def _dumps(
    files: Sequence[Path],
    executor: Executor | None,
    progress: Callable[[int, int], None] | None,
) -> list[RankState | str]:
    names = [str(file) for file in files]
    if executor is None and len(names) < _FILES_WORTH_A_POOL:
        return _read_many(names)
    chunks = [names[i : i + _CHUNK] for i in range(0, len(names), _CHUNK)]
    own = None
    if executor is None:
        executor = own = ProcessPoolExecutor(os.cpu_count())
    try:
        found: list[RankState | str] = []
        for part in executor.map(_read_many, chunks):
            found += part
            if progress is not None:
                progress(len(found), len(names))
        return found
    finally:
        if own is not None:
            own.shutdown()


def hang(
    paths: Sequence[Path],
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HangReport:
    """Read dumps (files or folders) or a kansoku run folder and name the ranks at fault.

    ``progress`` gets the files read and those there are. Unreadable dumps are evidence: their ranks
    count as silent. Raises InputError if there is nothing to read, or nothing of it can be.
    """
    with _without_collection():
        return _hang(paths, executor, progress)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector: it walks a million objects again and again, and frees none.

    It halves the time of 2,000 dumps. Processes that are forked meanwhile do without as well.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _hang(
    paths: Sequence[Path],
    executor: Executor | None,
    progress: Callable[[int, int], None] | None,
) -> HangReport:
    runs = [path for path in paths if (path / "run.json").is_file()]
    rest = [path for path in paths if path not in runs]
    states = [state for path in runs for state in states_of_spans(*_run(path))]
    unreadable: list[str] = []
    files = _files(rest) if rest else []
    ncclish = [file for file in files if _is_ncclish(file)]
    moving: bool | None = None
    if ncclish:
        told, remarks, moving = _of_nccl(ncclish)
        states += told
        unreadable += remarks
        known = set(ncclish)
        files = [file for file in files if file not in known]
    for item in _dumps(files, executor, progress) if files else []:
        if isinstance(item, str):
            unreadable.append(item)
        else:
            states.append(item)
    if not states and not runs and unreadable:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise InputError(f"nothing here tells of a hang: {unreadable[0]}{more}")
    seen: dict[int, RankState] = {}
    for state in states:
        if state.rank in seen:
            unreadable.append(
                f"{state.file}: rank {state.rank} again, after {seen[state.rank].file}"
            )
        else:
            seen[state.rank] = state
    kept = tuple(seen[rank] for rank in sorted(seen))
    verdict = analyse_hang(kept)
    if ncclish and not files and not runs:
        verdict = _judge_counts(verdict, moving=moving)
    return HangReport(verdict=verdict, states=kept, unreadable=tuple(unreadable))


def _run(path: Path) -> tuple[pl.DataFrame, RunFacts]:
    run = read_run(path)
    return run.spans, run.facts


def hang_json(report: HangReport) -> dict[str, object]:
    """Return the versioned answer."""
    verdict = report.verdict
    return {
        "schema": SCHEMA,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "culprits": list(verdict.culprits),
        "groups": [
            {
                "group": one.group,
                "description": one.description,
                "ranks": list(one.ranks),
                "sequence": one.sequence,
                "operation": one.operation,
                "entered": list(one.entered),
                "missing": list(one.missing),
                "not_started": list(one.not_started),
            }
            for one in verdict.groups
        ],
        "evidence": [*verdict.evidence, *report.unreadable],
        "ranks_read": len(report.states),
    }


def found(report: HangReport) -> Verdict:
    """Return whether a hang was found."""
    if report.verdict.verdict in _BLAMED:
        return Verdict.FOUND
    return Verdict.NONE if report.verdict.verdict == "none" else Verdict.UNKNOWN


def hang_view(report: HangReport) -> View:
    """Return what a person reads."""
    verdict = report.verdict
    tone = {Verdict.FOUND: Tone.BAD, Verdict.NONE: Tone.GOOD, Verdict.UNKNOWN: Tone.NOTICE}
    blocks: list[Facts | Sentence | Table] = [
        Sentence(
            text=verdict.reason[:1].upper() + verdict.reason[1:] + ".", tone=tone[found(report)]
        ),
        Facts(
            items=[
                ("verdict", verdict.verdict),
                ("culprits", ", ".join(map(str, verdict.culprits)) or "none"),
                ("ranks read", str(len(report.states))),
            ]
        ),
    ]
    blocks += [Sentence(text=line) for line in verdict.evidence[:12]]
    blocks += [Sentence(text=line, tone=Tone.NOTICE) for line in report.unreadable[:6]]
    if verdict.groups:
        blocks.append(
            Table(
                title="Groups with an operation that did not end",
                columns=[
                    Column(title="group"),
                    Column(title="operation"),
                    Column(title="sequence", numeric=True),
                    Column(title="entered", numeric=True),
                    Column(title="missing"),
                ],
                rows=[
                    (
                        f"{one.group} {one.description or ''}".strip(),
                        one.operation,
                        one.sequence,
                        f"{len(one.entered)}/{len(one.ranks)}",
                        ", ".join(map(str, one.missing[:8])) or None,
                    )
                    for one in verdict.groups[:12]
                ],
            )
        )
    return View(title="Hang", blocks=blocks)
