"""Watch a job that is already running, from outside: ``kansoku attach``."""

import errno
import gc
import json
import os
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kansoku.capture.attach import BpfError, Observer, Process, descendants
from kansoku.capture.attach.probes import library_of
from kansoku.capture.attach.slurm import cgroup_job, parse_listpids
from kansoku.capture.payload.drain import Drain
from kansoku.errors import InputError, PlatformError
from kansoku.formats.run_directory import read_run

__all__ = ["Attachment", "attach", "slurm_processes"]

_POLL_S = 0.02
_DRAIN_S = 0.1
_FIND_S = 0.25
_SAY_S = 1.0
_ASK_SLURM_S = 1.0
_REMEDY = "run as root, or give the capabilities CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What was watched and where its records are."""

    run: str
    out: Path
    reason: str
    """Why it ended: ``ended`` (every process has), ``detached``, ``duration``."""
    processes: tuple[dict[str, Any], ...]
    """pid, rank, libraries with probes, calls noted, exit code where seen."""
    events: int
    dropped: int
    missing: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the answer of ``attach --json``."""
        return {
            "schema": "kansoku.attach/1",
            "run": self.run,
            "out": str(self.out),
            "reason": self.reason,
            "processes": list(self.processes),
            "events": self.events,
            "dropped": self.dropped,
            "missing": list(self.missing),
        }


def slurm_processes(job: str) -> list[int]:
    """Return the processes of a Slurm job on this node.

    ``scontrol listpids`` is asked first (it works on the node itself), then the cgroups of all
    processes. Raise InputError where the job has none here.
    """
    if "_" in job:
        raise InputError(
            f"{job} names a task of an array, not a job",
            where="--slurm-job",
            remedy=f"give the job ID that the task has of its own: squeue -h -j {job} -o %A",
        )
    found: list[int] = []
    try:
        answer = subprocess.run(
            ["scontrol", "listpids", job], capture_output=True, text=True, timeout=20, check=False
        )
        found = parse_listpids(answer.stdout, job)
    except (OSError, subprocess.TimeoutExpired):
        pass
    if not found:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "cgroup").read_text(encoding="utf-8")
            except OSError:
                continue
            if cgroup_job(text) == job:
                found.append(int(entry.name))
    if not found:
        raise InputError(
            f"Slurm job {job} has no process on this node",
            where="--slurm-job",
            remedy="run the same command on a node of the job (squeue -j ID -o %N names them)",
        )
    return sorted(set(found))


def attach(
    pids: Sequence[int] = (),
    *,
    slurm_job: str | None = None,
    out: Path | None = None,
    duration_s: float | None = None,
    children: bool = True,
    launches: bool = False,
    until: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] | None = None,
) -> Attachment:
    """Watch processes until they have ended, ``until`` says so, or ``duration_s`` is over.

    With ``children`` the processes below the named ones count too, also those started later. A
    process that maps no torch, NCCL or CUDA leaves no record. Raise InputError where there is no
    process to watch, PlatformError where the kernel or our rights do not allow it.
    """
    if slurm_job is not None:
        pids = [*pids, *(pid for pid in slurm_processes(slurm_job) if pid != os.getpid())]
    if not pids:
        raise InputError("no process to watch", remedy="kansoku attach PID…, or --slurm-job ID")
    session = _Session.begin(list(pids), slurm_job, out, children=children, launches=launches)
    reason = "detached"
    try:
        reason = session.watch(until, duration_s, say)
    except KeyboardInterrupt:
        pass
    finally:
        session.end()
    return session.outcome(reason)


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise PlatformError(
            f"watching from outside is written for x86-64 Linux, not {platform.machine()}",
            remedy="start the job with kansoku run",
        )


def _make_observer(ring_dir: Path, run: str, node: str, *, launches: bool) -> Observer:
    try:
        return Observer(ring_dir=str(ring_dir), run=run, node=node, launches=launches)
    except BpfError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise PlatformError(
                "the kernel lets us load no eBPF program", where="bpf()", remedy=_REMEDY
            ) from error
        raise PlatformError(
            f"this kernel has no usable eBPF: {error}",
            where=f"Linux {os.uname().release}",
            remedy="Linux 6.6 or newer is needed (uprobe_multi); or start the job with kansoku run",
        ) from error


class _Copies(Drain):
    """A drain that finishes a copy when the observer is done with it, not when the process is.

    A process that has ended may still have calls waiting in the kernel's ring.
    """

    def poll(self) -> int:
        """Copy what is new."""
        self._find()
        return sum(copy.poll() for copy in self.copies.values())

    def complete(self, name: str) -> bool:
        """Keep what is left of a ring and remove it; False where the disk does not take it."""
        copy = self.copies.get(name)
        if copy is None:
            return True
        copy.poll()
        if copy.failed:
            return False
        try:
            copy.finish()
        except OSError:
            return False
        del self.copies[name]
        self.finished.add(name)
        return True


class _Job:
    """The processes of a Slurm job, asked for again while it is watched.

    The tasks of a step that starts later are no children of what was there before. Asking may take
    seconds, in which the kernel's ring would overflow: hence a thread.
    """

    def __init__(self, job: str):
        self.job = job
        self.pids: tuple[int, ...] = ()
        """As of the last answer; this process is none of them."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="kansoku-slurm", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._stop.wait(_ASK_SLURM_S):
            try:
                found = slurm_processes(self.job)
            except (InputError, OSError):
                found = []
            self.pids = tuple(pid for pid in found if pid != os.getpid())

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()


class _Session:
    """One attachment: the observer, the drain, and the run directory."""

    def __init__(
        self, *, out: Path, run: str, ring_dir: Path, observer: Observer, facts: dict[str, Any]
    ):
        self.out, self.run, self.ring_dir = out, run, ring_dir
        self.observer = observer
        self.facts = facts
        self.drain = _Copies(str(ring_dir), str(out))
        self.roots: list[int] = []
        self.job: _Job | None = None
        self.children = True
        self._drained = self._found = self._said = 0.0

    @classmethod
    def begin(
        cls,
        pids: list[int],
        slurm_job: str | None,
        out: Path | None,
        *,
        children: bool,
        launches: bool,
    ) -> "_Session":
        _check_platform()
        try:
            command = Process(pids[0]).command()
            for pid in pids[1:] if slurm_job is None else []:
                Process(pid)
        except OSError as error:
            raise InputError(
                f"no process {' '.join(map(str, pids))}: {error.strerror or error}",
                remedy="name running processes: pgrep -f train.py",
            ) from error
        run = f"attach-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        out = (out or Path("runs") / run).absolute()
        if (out / "run.json").exists():
            raise InputError(
                "this folder holds another run", where=str(out), remedy="choose another --out"
            )
        ring_dir = Path(os.environ.get("KANSOKU_RING_DIR") or "/dev/shm/kansoku") / run  # noqa: S108
        try:
            out.mkdir(parents=True, exist_ok=True)
            ring_dir.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise InputError(
                f"a folder cannot be written: {error.strerror}",
                where=str(error.filename),
                remedy="choose another --out, or KANSOKU_RING_DIR",
            ) from error
        node = os.environ.get("KANSOKU_NODE") or os.uname().nodename
        facts = {
            "schema": "kansoku.run/1",
            "run": run,
            "command": command,
            "start_ns": time.time_ns(),
            "end_ns": None,
            "exit_code": None,
            "slurm_job": slurm_job,
            "nodes": [node],
            "ring_dir": str(ring_dir),
            "ring_node": os.uname().nodename,
            "ranks": [],
            "missing": [],
        }
        try:
            observer = _make_observer(ring_dir, run, node, launches=launches)
        except PlatformError:
            ring_dir.rmdir()
            raise
        session = cls(out=out, run=run, ring_dir=ring_dir, observer=observer, facts=facts)
        session.roots, session.children = pids, children
        if slurm_job is not None:
            session.job = _Job(slurm_job)
        session.write()
        return session

    def write(self) -> None:
        """Write ``run.json``."""
        partial = self.out / f".run.json.{os.getpid()}"
        partial.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        partial.replace(self.out / "run.json")

    def miss(self, sentence: str) -> None:
        if sentence not in self.facts["missing"]:
            self.facts["missing"].append(sentence)

    def watch(
        self,
        until: Callable[[], bool],
        duration_s: float | None,
        say: Callable[[str], None] | None,
    ) -> str:
        """Poll until there is a reason to stop; return it."""
        began = time.monotonic()
        while True:
            now = time.monotonic()
            if now - self._found >= _FIND_S:
                self._found = now
                self._find()
            self.observer.poll()
            if now - self._drained >= _DRAIN_S:
                self._drained = now
                self.drain.poll()
                self._complete_ended()
            if say is not None and now - self._said >= _SAY_S:
                self._said = now
                say(self._line())
            if until():
                return "detached"
            if duration_s is not None and now - began >= duration_s:
                return "duration"
            if not any(_runs(pid) for pid in self._named()) and all(
                watched.ended for watched in self.observer.watched.values()
            ):
                return "ended"
            time.sleep(_POLL_S)

    def _named(self) -> list[int]:
        """Return the named processes, and the job's as it is now."""
        return [*self.roots, *(self.job.pids if self.job is not None else ())]

    def _complete_ended(self) -> None:
        """Keep the records of ended processes and free their rings."""
        ended = [
            watched
            for watched in self.observer.watched.values()
            if watched.ended
            and watched.writer is not None
            and self.drain.complete(Path(watched.path).name)
        ]
        for watched in ended:
            watched.release()
        if ended:
            gc.collect()  # a writer holds itself, and it the removed file's memory

    def _find(self) -> None:
        """Watch the named processes and those below them."""
        wanted = self._named()
        if self.children:
            wanted = [below for root in wanted for below in descendants(root)]
        own = os.getpid()
        for pid in dict.fromkeys(wanted):
            known = self.observer.watched.get(pid)
            if pid == own or (known is not None and not known.ended) or not _runs(pid):
                continue
            if known is not None and (known.failure or not known.process.alive()):
                continue
            try:
                self.observer.add(pid)
            except PermissionError as error:
                raise PlatformError(
                    f"process {pid} may not be watched", where=f"/proc/{pid}", remedy=_REMEDY
                ) from error
            except (ProcessLookupError, FileNotFoundError):
                continue
            except OSError as error:
                self.miss(f"process {pid} is not watched: {error}")

    def _line(self) -> str:
        watched = [each for each in self.observer.watched.values() if each.book.calls]
        steps = [each.book.step for each in watched if each.book.step >= 0]
        said = f"{len(watched)} processes seen · {self.observer.events:,} calls"
        if steps:
            said += f" · step {max(steps)}"
        return said

    def end(self) -> None:
        """Take the probes out, keep the last records, write how it ended."""
        if self.job is not None:
            self.job.close()
        self.observer.close()
        for watched in self.observer.watched.values():
            if watched.failure:
                self.miss(f"process {watched.pid} is not watched: {watched.failure}")
        self.drain.poll()
        for name in list(self.drain.copies):
            if not self.drain.complete(name):
                self.miss(f"{name} could not be written; its ring is still in {self.ring_dir}")
        try:
            self.ring_dir.rmdir()
        except OSError:
            self.miss(f"rings are left in {self.ring_dir}")
        self.facts["end_ns"] = time.time_ns()
        codes = {w.exit_code for w in self.observer.watched.values() if w.book.calls}
        if len(codes) == 1:
            self.facts["exit_code"] = codes.pop()
        try:
            data = read_run(self.out)
            self.facts["ranks"] = [
                {"rank": r.rank, "node": r.node, "pid": r.pid, "device": r.device}
                for r in data.facts.ranks
            ]
            if not data.facts.ranks:
                self.miss("no process was seen to train: none called torch's process groups or "
                          "autograd, NCCL or CUDA")  # fmt: skip
        except InputError as error:
            self.miss(str(error))
        self.write()

    def outcome(self, reason: str) -> Attachment:
        """Return what was seen."""
        return Attachment(
            run=self.run,
            out=self.out,
            reason=reason,
            processes=tuple(
                {
                    "pid": watched.pid,
                    "rank": watched.rank if watched.rank >= 0 else None,
                    "libraries": list(watched.attached),
                    "calls": watched.book.calls,
                    "exit_code": watched.exit_code,
                }
                for watched in self.observer.watched.values()
                # A compiler or shell below a rank is watched for what it may load; it is no rank.
                if watched.pid in self.roots
                or any(library_of(n) != "libc" for n in watched.attached)
            ),
            events=self.observer.events,
            dropped=self.observer.dropped,
            missing=tuple(self.facts["missing"]),
        )


def _runs(pid: int) -> bool:
    try:
        Process(pid)
    except OSError:
        return False
    return True
