"""Take profiler traces of a running, unchanged job from outside: ``kansoku trace record``."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.attach import slurm_processes
from kansoku.capture.attach import Process, descendants
from kansoku.errors import InputError, PlatformError
from kansoku.formats.kineto import find_sources, read_trace
from kansoku.formats.kineto_daemon import ACTIVITIES, Register, Request
from kansoku.trace.edge.kineto_daemon import KinetoEndpoint
from kansoku.trace.recording import (
    MARGIN_NS,
    POLL_INTERVAL_NS,
    Plan,
    Round,
    Target,
    version_is_safe,
)
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["RecordResult", "TakenTrace", "record"]

SCHEMA = "kansoku.trace.record/1"
_TICK_S = 0.1
# A process that has not asked for so long does not listen.
_SILENCE_NS = 4 * POLL_INTERVAL_NS
# Kineto processes a trace after it was taken; minutes where it is large.
_WRITING_NS = 60_000_000_000
_ATTEMPTS = 3
_WIDER_MARGIN = 5
"""On a machine with thirty runnable processes a thread that sleeps five seconds may take ten."""
_SAME_STEPS = 0.5
_LIBRARY = "libtorch_cpu.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTrace:
    """One process's trace."""

    pid: int
    rank: int | None
    file: Path
    size_bytes: int
    start_ns: int | None
    """Unix time of the first row."""
    duration_ms: float | None
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResult:
    """What was recorded."""

    out: Path
    traces: tuple[TakenTrace, ...]
    missing: tuple[tuple[int, int | None, str], ...]
    """(pid, rank, why) of processes without a trace."""
    notes: tuple[str, ...]

    @property
    def overlap_ratio(self) -> float | None:
        """Return how much of the time in any trace is in all of them; 1 is the same time."""
        spans = [
            (one.start_ns, one.start_ns + one.duration_ms * 1e6)
            for one in self.traces
            if one.start_ns is not None and one.duration_ms is not None
        ]
        if not spans or len(spans) < len(self.traces):
            return None
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        common = min(end for _, end in spans) - max(start for start, _ in spans)
        return max(common, 0.0) / whole if whole > 0 else None

    def frame(self) -> pl.DataFrame:
        """Return one row per trace."""
        return pl.DataFrame(
            [
                {"pid": t.pid, "rank": t.rank, "file": str(t.file), "bytes": t.size_bytes,
                 "start_ns": t.start_ns, "duration_ms": t.duration_ms, "rows": t.rows}
                for t in self.traces
            ]
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "out": str(self.out),
            "traces": self.frame().to_dicts() if self.traces else [],
            "overlap_ratio": self.overlap_ratio,
            "missing": [
                {"pid": pid, "rank": rank, "reason": reason} for pid, rank, reason in self.missing
            ],
            "notes": list(self.notes),
        }

    def view(self) -> View:
        """Return what a person reads."""
        overlap = self.overlap_ratio
        blocks: list[Block] = [
            Facts(
                items=[
                    ("traces", str(len(self.traces))),
                    ("in", str(self.out)),
                    ("at the same time", "unknown" if overlap is None else f"{overlap:.1%}"),
                ]
            )
        ]
        if self.traces:
            blocks.append(
                Table(
                    title="Traces",
                    columns=[
                        Column(title="rank", numeric=True),
                        Column(title="pid", numeric=True),
                        Column(title="ms", numeric=True),
                        Column(title="rows", numeric=True),
                        Column(title="file"),
                    ],
                    rows=[
                        (
                            t.rank,
                            t.pid,
                            None if t.duration_ms is None else f"{t.duration_ms:.1f}",
                            t.rows,
                            t.file.name,
                        )
                        for t in self.traces
                    ],
                )
            )
        blocks += [
            Sentence(
                text=f"{'process' if rank is None else f'rank {rank}, process'} {pid}: {reason}",
                tone=Tone.BAD,
            )
            for pid, rank, reason in self.missing
        ]
        blocks += [Sentence(text=note, tone=Tone.NOTICE) for note in self.notes]
        if self.traces:
            blocks.append(
                Sentence(
                    text="Next: where the time goes.", detail=f"kansoku trace breakdown {self.out}"
                )
            )
        return View(title="Recorded traces", blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    process: Process
    rank: int | None
    folder: str | None
    version: str | None
    uid: int
    gid: int


def record(
    pids: Sequence[int] = (),
    *,
    slurm_job: str | None = None,
    plan: Plan,
    out: Path | None = None,
    force: bool = False,
    timeout_s: float = 120.0,
    say: Callable[[str], None] = lambda _line: None,
) -> RecordResult:
    """Have every process of a job on this node write a profiler trace at the same time.

    ``pids`` may be launchers: processes below them count too. A start sooner than all can keep is
    moved. Where the ranks took different steps, it is done again with a wider multiple; where one
    asked too late for the start, with a later one. Raises
    InputError where no process can be asked, PlatformError where torch is too old (unless
    ``force``) or another daemon answers.
    """
    named = [*pids, *(slurm_processes(slurm_job) if slurm_job is not None else ())]
    if not named:
        raise InputError(
            "no process to record", remedy="kansoku trace record PID…, or --slurm-job ID"
        )
    found = _candidates(named)
    notes = _check_versions(found, force=force)
    folders = {one.folder for one in found}
    if len(folders) > 1:
        raise InputError(
            "the processes use different KINETO_IPC_SOCKET_DIR: " + ", ".join(map(str, folders)),
            remedy="record them one after the other",
        )
    place = _make_folder(out, found)
    folder = folders.pop()
    with KinetoEndpoint(None if folder is None else Path(folder)) as endpoint:
        margin_ns = MARGIN_NS
        for attempt in range(1, _ATTEMPTS + 1):
            session = _Session(found, plan, place, endpoint, say, margin_ns)
            session.run(timeout_s)
            result = session.result(place, tuple(notes))
            last = attempt == _ATTEMPTS
            if not last and (again := _wider(result, session.round)) is not None:
                say(f"the ranks took different steps; again, at a multiple of {again}")
                plan = replace(plan, round_up=again)
            elif not last and session.round.late and plan.start_ns is None:
                say("a process asked too late for the start; again, with more time")
                margin_ns *= _WIDER_MARGIN
            else:
                return result
            for trace in result.traces:
                trace.file.unlink()
    raise AssertionError("the last attempt returns")


def _wider(result: RecordResult, told: Round) -> int | None:
    """Return a multiple of steps that all will take, if they did not; from the steps' own time.

    A multiple of four times the answers' spread is missed by one round in four.
    """
    overlap = result.overlap_ratio
    steps = told.plan.steps
    if steps is None or overlap is None or overlap >= _SAME_STEPS or result.missing:
        return None
    step_ns = max(1e6 * (trace.duration_ms or 0) for trace in result.traces) / steps
    return max(int(4 * told.spread_ns / step_ns) + steps, told.plan.round_up + 1)


class _Session:
    """Answer until every process has written its trace, died or stayed silent."""

    def __init__(
        self,
        found: Sequence[_Candidate],
        plan: Plan,
        place: Path,
        endpoint: KinetoEndpoint,
        say: Callable[[str], None],
        margin_ns: int,
    ):
        self.ranks = {one.process.pid: one.rank for one in found}
        targets = {
            pid: Target(
                pid=pid,
                rank=rank,
                file=str(place / ("trace.json" if rank is None else f"rank{rank}.json")),
            )
            for pid, rank in self.ranks.items()
        }
        self.round = Round(plan=plan, targets=targets, margin_ns=margin_ns)
        self.endpoint = endpoint
        self.say = say
        self.processes = {one.process.pid: one.process for one in found}
        self.files: dict[int, Path] = {}
        self.lost: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def run(self, timeout_s: float) -> None:
        begin = time.monotonic_ns()
        told = False
        self.say(f"waiting for {len(self.processes)} processes to ask (every 5 s)")
        while self._waiting():
            self.endpoint.serve(self._answer, _TICK_S)
            now = time.monotonic_ns()
            if not told and self.round.told_ns and self.round.complete:
                told = True
                self.say("all have been told; they record now")
            self._look()
            self._lose(now - begin, timeout_s)

    def _waiting(self) -> list[int]:
        return [pid for pid in self.processes if pid not in self.files and pid not in self.lost]

    def _answer(self, pid: int, message: Register | Request) -> str:
        if isinstance(message, Register) or not message.type & ACTIVITIES:
            return ""
        return self.round.on_request(pid, now_ns=time.monotonic_ns(), unix_ns=time.time_ns())

    def _look(self) -> None:
        """Take files that are there and have stopped growing."""
        for pid in self._waiting():
            target = self.round.targets.get(pid)
            if target is None or pid not in self.round.told_ns:
                continue
            file = Path(f"{target.file.removesuffix('.json')}_{self._own_pid(pid)}.json")
            try:
                size = file.stat().st_size
            except OSError:
                continue
            if size and size == self._sizes.get(pid) and _ends_whole(file):
                self.files[pid] = file
            self._sizes[pid] = size

    def _own_pid(self, pid: int) -> int:
        """Return the process's number where it lives: in a container, the last of its NSpid."""
        if pid not in self._numbers:
            self._numbers[pid] = _namespaced(pid)
        return self._numbers[pid]

    def result(self, place: Path, notes: tuple[str, ...]) -> RecordResult:
        """Return what was recorded."""
        traces = [_read(pid, self.ranks[pid], file) for pid, file in self.files.items()]
        return RecordResult(
            out=place,
            traces=tuple(sorted(traces, key=lambda t: (t.rank is None, t.rank, t.pid))),
            missing=tuple((pid, self.ranks[pid], why) for pid, why in sorted(self.lost.items())),
            notes=notes,
        )

    def _lose(self, waited_ns: int, timeout_s: float) -> None:
        now = time.monotonic_ns()
        end = self.round.expected_end_ns(now, time.time_ns())
        for pid in self._waiting():
            reason = None
            if not self.processes[pid].alive():
                reason = "it ended before its trace was written"
            elif pid in self.round.late:
                reason = "it asked too late for the start: the machine is busy"
            elif pid not in self.round.asked_ns and waited_ns > _SILENCE_NS:
                reason = "it did not ask: was it started with KINETO_USE_DAEMON=1?"
            elif end is not None and now > end + _WRITING_NS:
                reason = "it was told, but wrote no trace: its log says why"
            elif waited_ns > timeout_s * 1e9:
                told = pid in self.round.told_ns
                reason = f"no trace within {timeout_s:.0f} s" + ("" if told else ", never told")
            if reason is not None:
                self.lost[pid] = reason
                self.round.give_up(pid)


def _namespaced(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError, IndexError):
        pass
    return pid


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 64))
        return stream.read().rstrip().endswith(b"}")


def _candidates(pids: Sequence[int]) -> list[_Candidate]:
    """Return the processes with torch that were started to be asked; forked workers are none."""
    every = list(dict.fromkeys(one for pid in pids for one in descendants(pid)))
    found: dict[int, _Candidate] = {}
    without = 0
    for pid in every:
        try:
            process = Process(pid)
            library = next((m.path for m in process.mappings() if m.path.endswith(_LIBRARY)), None)
            if library is None:
                continue
            environment = process.environment()
            owner = Path(f"/proc/{pid}").stat()
        except OSError:
            continue
        if not environment.get("KINETO_USE_DAEMON"):
            without += 1
            continue
        rank = process.ranks()[0]
        found[pid] = _Candidate(
            process=process,
            rank=None if rank < 0 else rank,
            folder=environment.get("KINETO_IPC_SOCKET_DIR") or None,
            version=process.torch_version(library),
            uid=owner.st_uid,
            gid=owner.st_gid,
        )
    # A launcher has torch but no rank; a forked worker has its parent's rank.
    if any(one.rank is not None for one in found.values()):
        found = {pid: one for pid, one in found.items() if one.rank is not None}
    kept = [one for pid, one in found.items() if _parent(pid) not in found]
    if not kept:
        raise InputError(
            f"{without} processes map torch, none was started with KINETO_USE_DAEMON=1"
            if without
            else "no process maps torch",
            where=", ".join(map(str, pids[:8])),
            remedy="start the job with KINETO_USE_DAEMON=1; nothing else changes for it",
        )
    return kept


def _parent(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _check_versions(found: Sequence[_Candidate], *, force: bool) -> list[str]:
    old = sorted({one.version or "unknown" for one in found if not version_is_safe(one.version)})
    if not old:
        return []
    text = f"torch {', '.join(old)}: asking may crash the job (a race fixed in torch 2.10)"
    if not force:
        raise PlatformError(text, remedy="--force asks nevertheless")
    return [text]


def _make_folder(out: Path | None, found: Sequence[_Candidate]) -> Path:
    """Make the folder, writable by the job's user; the job writes there itself."""
    place = (out or Path(f"kansoku-traces-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    users = {(one.uid, one.gid) for one in found}
    if len(users) > 1:
        raise InputError("processes of several users", remedy="record them one after the other")
    uid, gid = users.pop()
    fresh = not place.exists()
    place.mkdir(parents=True, exist_ok=True)
    if fresh and os.geteuid() == 0 and uid != 0:
        os.chown(place, uid, gid)
    return place


def _read(pid: int, rank: int | None, file: Path) -> TakenTrace:
    start = duration = rows = None
    try:
        trace = read_trace(find_sources([file])[0])
        rows = trace.rows
        if trace.host_start_ns is not None and trace.host_end_ns is not None:
            start = (trace.metadata.base_ns or 0) + trace.host_start_ns
            duration = (trace.host_end_ns - trace.host_start_ns) / 1e6
    except InputError:
        pass  # its size is still told
    return TakenTrace(
        pid=pid,
        rank=rank,
        file=file,
        size_bytes=file.stat().st_size,
        start_ns=start,
        duration_ms=duration,
        rows=rows,
    )
