"""Why a job hangs: from dumps of its ranks to the ranks at fault."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.errors import InputError
from kansoku.formats.flight_recorder import rank_in_name, read_dump
from kansoku.formats.run_directory import read_run
from kansoku.model import RunFacts, Verdict
from kansoku.trace.hang.analyse import HangVerdict, analyse_hang
from kansoku.trace.hang.flight_recorder import state_of_dump
from kansoku.trace.hang.record import RankState
from kansoku.trace.hang.spans import states_of_spans
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = ["HangReport", "hang", "hang_json", "hang_view"]

SCHEMA = "kansoku.trace.hang/1"
# Below this a second process costs more than it saves.
_FILES_WORTH_A_POOL = 400
_CHUNK = 100
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
    for path in paths:
        if path.is_dir():
            files += sorted(
                p for p in path.rglob("*") if p.is_file() and rank_in_name(p) is not None
            )
        elif path.is_file():
            files.append(path)
        else:
            raise InputError("no such file or folder", where=str(path))
    if not files:
        raise InputError(
            "no dumps found",
            where=", ".join(map(str, paths)),
            remedy="names end in the rank: nccl_trace_rank_3, _dump_3",
        )
    return files


def _dumps(
    files: Sequence[Path], executor: Executor | None, advance: Callable[[int], None]
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
            advance(len(part))
        return found
    finally:
        if own is not None:
            own.shutdown()


def hang(
    paths: Sequence[Path],
    *,
    executor: Executor | None = None,
    advance: Callable[[int], None] = lambda _count: None,
) -> HangReport:
    """Read dumps (files or folders) or a kansoku run folder and name the ranks at fault.

    ``advance`` is told how many files were read, for progress. Unreadable dumps are evidence: their
    ranks count as silent. Raises InputError if there is nothing to read.
    """
    runs = [path for path in paths if (path / "run.json").is_file()]
    rest = [path for path in paths if path not in runs]
    states = [state for path in runs for state in states_of_spans(*_run(path))]
    unreadable: list[str] = []
    for item in _dumps(_files(rest), executor, advance) if rest else []:
        if isinstance(item, str):
            unreadable.append(item)
        else:
            states.append(item)
    seen: dict[int, RankState] = {}
    for state in states:
        if state.rank in seen:
            unreadable.append(
                f"{state.file}: rank {state.rank} again, after {seen[state.rank].file}"
            )
        else:
            seen[state.rank] = state
    kept = tuple(seen[rank] for rank in sorted(seen))
    return HangReport(verdict=analyse_hang(kept), states=kept, unreadable=tuple(unreadable))


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
