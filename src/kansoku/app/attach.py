"""Watch a job that is already running, from outside: ``kansoku attach``."""

import contextlib
import gc
import os
import re
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kansoku.app._attach_refusals import (
    check_platform,
    make_observer,
    refused,
    remedy,
    unwritable,
)
from kansoku.app._run_files import make_ring_dir, refusal, write_facts, write_in_place
from kansoku.capture.attach import Observer, Process, Watched, descendants
from kansoku.capture.attach.probes import library_of
from kansoku.capture.attach.slurm import cgroup_job, parse_listpids
from kansoku.capture.payload.drain import Drain
from kansoku.errors import InputError, PlatformError
from kansoku.formats.run_directory import read_run
from kansoku.model import ring

__all__ = ["Attachment", "attach", "slurm_processes"]

_POLL_S = 0.02
_DRAIN_S = 0.1
_FIND_S = 0.25
_SAY_S = 1.0
_ASK_SLURM_S = 1.0


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
    left: str | None = None
    """Which records are in their rings alone, and how to read and remove them: a full disk."""
    end_written: bool = True
    """False where ``run.json`` could not be told how it ended: nobody else will say it."""

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
    session.check_room()
    return session.outcome(reason)


def _process_of(pid: int) -> int:
    """Return the process that a thread belongs to; a process is its own."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return pid
    found = re.search(rb"^Tgid:\s+(\d+)$", status, re.MULTILINE)
    return int(found[1]) if found else pid


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

    def give_up(self) -> None:
        """Leave what is not complete to its rings; of its copies stays what can be read."""
        for copy in self.copies.values():
            with contextlib.suppress(OSError):
                os.ftruncate(copy.file, min(copy.size, os.fstat(copy.file).st_size))
                try:
                    ring.read_header(os.pread(copy.file, copy.records_offset, 0))
                except ring.RingError:
                    target = Path(copy.target)
                    target.unlink()
                    target.parent.rmdir()
        self.release()


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
        self.refused: dict[int, PermissionError] = {}
        """Processes that we may not watch."""
        self.ended_ns: dict[int, int] = {}
        """Unix time at which a process was seen to end."""
        self.left: str | None = None
        self.end_written = True
        self._made: list[Path] = []
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
        check_platform()
        pids = list(dict.fromkeys(_process_of(pid) for pid in pids))
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
            "processes": [],
            "missing": [],
        }
        observer = make_observer(ring_dir, run, node, launches=launches)
        session = cls(out=out, run=run, ring_dir=ring_dir, observer=observer, facts=facts)
        session.roots, session.children = pids, children
        try:
            session.take_up()
        except BaseException:
            observer.close()
            session.remove()
            raise
        if slurm_job is not None:
            session.job = _Job(slurm_job)
        return session

    def take_up(self) -> None:
        """Make the folders and watch what is there. Raise KansokuError where either is refused."""
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            make_ring_dir(self.ring_dir)
        except OSError as error:
            raise unwritable("a folder", error, Path(error.filename or self.out)) from error
        try:
            write_facts(self.out, self.facts)
        except OSError as error:
            raise unwritable("run.json", error, self.out) from error
        self._find()
        if self.refused and not self.observer.watched:
            refusals = [refused(pid, error) for pid, error in self.refused.items()]
            raise PlatformError("; ".join(refusals), remedy=remedy())

    def remove(self) -> None:
        """Remove what was made: nothing was recorded."""
        with contextlib.suppress(OSError):
            (self.out / "run.json").unlink()
        for folder in (self.ring_dir, *self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def write_end(self) -> bool:
        """Write how it ended, over what is there where the disk is full; say whether it was."""
        try:
            write_facts(self.out, self.facts)
        except OSError as error:
            file = self.out / "run.json"
            if write_in_place(file, self.facts) or write_in_place(
                file, {**self.facts, "processes": []}
            ):
                return True
            self.miss(f"{file} could not be told how it ended: {error.strerror}")
            return False
        return True

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
                self._find()
            self.observer.poll()
            self._note_ends()
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
            if self._no_room() or not self._goes_on():
                return "ended"
            time.sleep(_POLL_S)

    def _named(self) -> list[int]:
        """Return the named processes, and the job's as it is now."""
        return [*self.roots, *(self.job.pids if self.job is not None else ())]

    def _goes_on(self) -> bool:
        """Say whether there is more to come: a process we may not watch is not waited for."""
        watched = self.observer.watched
        return any(not each.ended for each in watched.values()) or any(
            _runs(pid)
            for pid in self._named()
            if pid not in self.refused and not (pid in watched and watched[pid].failure)
        )

    def _no_room(self) -> list[Watched]:
        """Return the processes whose ring could not be made, where no record is of any."""
        watched = self.observer.watched.values()
        if any(each.book.calls for each in watched):
            return []
        return [each for each in watched if each.failure]

    def _note_ends(self) -> None:
        for pid, watched in self.observer.watched.items():
            if pid in self.ended_ns:
                continue
            gone = watched.ended and not watched.failure and not watched.process.alive()
            if gone or watched.exit_code is not None:
                self.ended_ns[pid] = time.time_ns()

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
        self._found = time.monotonic()
        for pid in dict.fromkeys(wanted):
            known = self.observer.watched.get(pid)
            if pid == own or (known is not None and not known.ended) or not _runs(pid):
                continue
            if known is not None and (known.failure or not known.process.alive()):
                continue
            try:
                self.observer.add(pid)
                self.refused.pop(pid, None)
            except PermissionError as error:
                self.refused[pid] = error
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
        self._note_ends()
        for pid, error in self.refused.items():
            self.miss(refused(pid, error))
        for watched in self.observer.watched.values():
            if watched.failure:
                self.miss(f"process {watched.pid} is not watched: {watched.failure}")
        self.drain.poll()
        for name in list(self.drain.copies):
            self.drain.complete(name)
        self.drain.give_up()
        self.left = self._left()
        if self.left:
            self.miss(self.left)
        self.facts["end_ns"] = time.time_ns()
        codes = {w.exit_code for w in self.observer.watched.values() if w.book.calls}
        if len(codes) == 1:
            self.facts["exit_code"] = codes.pop()
        self.facts["processes"] = [
            {
                "pid": watched.pid,
                # A launcher's environment may name a rank, too, as Slurm's does.
                "rank": watched.rank if watched.book.calls and watched.rank >= 0 else None,
                "node": self.facts["nodes"][0],
                "exit_code": watched.exit_code,
                "ended_ns": self.ended_ns.get(watched.pid),
            }
            for watched in self.observer.watched.values()
            if watched.book.calls or watched.pid in self.roots
        ]
        try:
            data = read_run(self.out)
            self.facts["ranks"] = [
                {"rank": r.rank, "node": r.node, "pid": r.pid, "device": r.device}
                for r in data.facts.ranks
            ]
            if not data.facts.ranks:
                self._say_why_none()
        except (InputError, OSError) as error:
            self.miss(str(error))
        self.end_written = self.write_end()

    def _left(self) -> str | None:
        """Remove the ring folder; where rings stay in it, say why, and what to do with them."""
        try:
            self.ring_dir.rmdir()
        except FileNotFoundError:
            return None
        except OSError:
            why = refusal(self.out)
            known = (self.out / "run.json").exists()
            return (
                f"records could not be written to {self.out}{f' ({why})' if why else ''}; rings "
                f"that hold the only copy stay in {self.ring_dir}: "
                f"kansoku report {shlex.quote(str(self.out if known else self.ring_dir))} "
                f"on this node reads them, rm -r {shlex.quote(str(self.ring_dir))} removes them"
            )
        return None

    def _say_why_none(self) -> None:
        """Say why nobody was seen to train, where that is not said yet."""
        unseen = [
            f"process {watched.pid}: {sentence}"
            for watched in self.observer.watched.values()
            for sentence in watched.facts["missing"]
            if "could not be probed" in sentence
        ]
        for sentence in unseen:
            self.miss(sentence)
        if not unseen and not self._no_room():
            which = "process that may be watched" if self.refused else "process"
            self.miss(f"no {which} was seen to train: none called torch's process groups or "
                      "autograd, NCCL or CUDA")  # fmt: skip

    def check_room(self) -> None:
        """Raise PlatformError where no ring could be made at all; then nothing is left behind."""
        failed = self._no_room()
        if not failed:
            return
        self.remove()
        raise PlatformError(
            f"nothing was recorded: of process {failed[0].pid} {failed[0].failure}",
            where=str(self.ring_dir.parent),
            remedy="free 8 MiB there for each process, or name another folder by KANSOKU_RING_DIR",
        )

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
            left=self.left,
            end_written=self.end_written,
        )


def _runs(pid: int) -> bool:
    try:
        Process(pid)
    except OSError:
        return False
    return True
