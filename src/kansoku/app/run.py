"""Run a job under observation: ``kansoku run``."""

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kansoku.app._processes import still_runs
from kansoku.app._run_files import make_ring_dir, refusal, write_facts, write_in_place
from kansoku.app._run_live import LiveLine
from kansoku.app.cpu_peak import measure_cpu_peak
from kansoku.app.resources import watched_resources
from kansoku.capture import environment, write_payload
from kansoku.capture.payload.drain import Drain
from kansoku.errors import InputError
from kansoku.formats.run_directory import open_ring, read_run
from kansoku.model.ring import RingError

__all__ = ["RunOutcome", "run"]

_log = logging.getLogger(__name__)

_POLL_S = 0.25
_LAST_WORDS_S = 3.0
_MAX_UNOBSERVED = 8
_MAX_DIGITS = 18
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (
    *_KEYBOARD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGIO, signal.SIGPWR,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How the job ended and where its records are."""

    exit_code: int
    """The job's own, or 128 + signal."""
    signal: int | None
    """The signal that killed it."""
    out: Path
    run: str
    message: str | None = None
    """Why the job did not start."""
    missing: tuple[str, ...] = ()
    end_written: bool = True
    """False where ``run.json`` could not be told how the job ended: nobody else will say it."""


def run(
    command: Sequence[str],
    *,
    out: Path | None = None,
    base_environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    say_every_s: float = 2.0,
    ended: Callable[[], None] | None = None,
    measure_peak: bool = True,
) -> RunOutcome:
    """Run ``command`` with the recorder in its environment; keep its rings under ``out``.

    ``say`` gets a line about the running job every ``say_every_s`` seconds; what it raises costs
    that line. Until the end of the job is written, signals to us are the job's or nobody's;
    ``ended`` is called before they are the caller's again. The job's streams are its own. Raise
    InputError where there is no command or ``out`` holds another run.
    """
    if not command:
        raise InputError("no command to run", remedy="kansoku run -- torchrun … train.py")
    base = dict(os.environ if base_environment is None else base_environment)
    launch = _prepare(command, out, base)
    if measure_peak and launch.writes_json and not Path("/dev/nvidia0").exists():
        launch.facts["peak"] = measure_cpu_peak()
    launch.write()
    live = LiveLine(launch.ring_dir, launch.facts.get("peak")) if say is not None else None
    child_environment = environment(
        base, payload=str(launch.payload), run=launch.run, out=str(launch.out), node=launch.node
    )
    signals = _Signals()
    try:
        # What the caller left open to hand over, such as a shell's <(…), is the job's.
        child = signals.child = subprocess.Popen(command, env=child_environment, close_fds=False)
    except OSError as error:
        signals.restore()
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        launch.end(code)
        message = f"{command[0]}: {error.strerror or error}"
        return RunOutcome(
            exit_code=code, signal=None, out=launch.out, run=launch.run, message=message
        )
    try:
        signals.deliver()
        samples = launch.out / launch.node if launch.drains else None
        with watched_resources(samples, launch.node, rings=launch.ring_dir):
            _watch(child, launch, live, say, say_every_s)
        killed_by = -child.returncode if child.returncode < 0 else None
        code = 128 + killed_by if killed_by else child.returncode
        end_written = launch.end(code)  # a Ctrl-C too many must not cost it
    finally:
        if ended is not None:
            ended()
        signals.restore()
    return RunOutcome(
        exit_code=code,
        signal=killed_by,
        out=launch.out,
        run=launch.run,
        missing=tuple(launch.facts["missing"]),
        end_written=end_written,
    )


@dataclass(slots=True, kw_only=True)
class _Launch:
    """Where this launch keeps what."""

    out: Path
    run: str
    node: str
    ring_dir: Path
    payload: Path
    facts: dict[str, Any]
    writes_json: bool
    """False on all but the first task of a job step: one of them writes ``run.json``."""
    drains: bool
    """One launcher a node drains."""
    disabled: bool
    """By the kill switch."""
    drain: subprocess.Popen[bytes] | None = None

    def write(self) -> bool:
        """Write ``run.json``; False where it could not be."""
        if not self.writes_json:
            return True
        try:
            write_facts(self.out, self.facts)
        except OSError as error:  # a full disk must not end the job
            if write_in_place(self.out / "run.json", self.facts):
                return True
            self.miss(f"run.json could not be written: {error.strerror}")
            return False
        return True

    def miss(self, sentence: str) -> None:
        if sentence not in self.facts["missing"]:
            self.facts["missing"].append(sentence)

    def start_drain(self) -> None:
        """Start the drain, again if it was killed."""
        if not self.drains:
            return
        if self.drain is not None:
            if self.drain.poll() is None:
                return
            self.miss("the drain was killed and started again")
        arguments = ["-S", "-m", "_kansoku.drain", str(self.ring_dir), str(self.out)]
        try:
            self.drain = subprocess.Popen(
                [sys.executable, *arguments, "--parent", str(os.getpid())],
                env={"PYTHONPATH": str(self.payload), "PATH": os.environ.get("PATH", "")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the job's, not the drain's
            )
        except OSError as error:
            self.drains = False
            self.miss(f"no drain: {error.strerror}; only what fits the rings is kept")

    def end(self, exit_code: int) -> bool:
        """Keep the last records and write how the job ended; False where it could not be."""
        if self.drain is not None:
            self.drain.kill()
            self.drain.wait()
        if self.drains:
            self._last_words()
        self.facts["end_ns"] = time.time_ns()
        self.facts["exit_code"] = exit_code
        if not self.writes_json:
            return True
        try:
            data = read_run(self.out)
            self.facts["nodes"] = list(data.facts.nodes) or [self.node]
            self.facts["ranks"] = [
                {"rank": r.rank, "node": r.node, "pid": r.pid, "device": r.device}
                for r in data.facts.ranks
            ]
            unobserved = _unobserved(self.out)
            for sentence in unobserved:
                self.miss(sentence)
            if not data.facts.ranks and not unobserved:
                why = (
                    "KANSOKU_DISABLE=1 switches the recorder off"
                    if self.disabled
                    else "none imported torch and trained"
                )
                self.miss(f"no process of the job was observed: {why}")
        except (InputError, OSError) as error:
            self.miss(str(error))
        return self.write()

    def _last_words(self) -> None:
        drain = Drain(str(self.ring_dir), str(self.out))
        deadline = time.monotonic() + _LAST_WORDS_S
        while True:
            drain.poll()
            if not drain.copies and not drain.held:
                break
            if time.monotonic() > deadline:
                drain.release()
                break
            time.sleep(_POLL_S)
        try:
            self.ring_dir.rmdir()
        except OSError:
            for sentence in _left(self.ring_dir, self.out):
                self.miss(sentence)


def _left(ring_dir: Path, out: Path) -> list[str]:
    """Say why rings are still there; files that are none stay for the report to name."""
    living = ended = 0
    for file in ring_dir.glob("*.ring"):
        try:
            buffer, header = open_ring(file)
        except (OSError, ValueError, RingError):
            continue
        buffer.close()
        if still_runs(header.pid, header.process_start):
            living += 1
        else:
            ended += 1
    said = []
    if living:
        said.append("processes of the job outlived it; their rings are still in place")
    if ended:
        why = refusal(out)
        said.append(
            f"records could not be written to {out}{f' ({why})' if why else ''}; "
            f"rings of ended processes ({ended}) were left in {ring_dir}"
        )
    return said


def _unobserved(out: Path) -> list[str]:
    """Return what processes that found no room for a ring left to say."""
    found = sorted(out.glob("unobserved-*.txt"))
    lines = [
        " ".join(path.read_text("utf-8", "replace")[:500].split())
        for path in found[:_MAX_UNOBSERVED]
        if path.is_file()
    ]
    if len(found) > _MAX_UNOBSERVED:
        lines.append(f"{len(found) - _MAX_UNOBSERVED} more processes were not observed")
    return lines


def _prepare(command: Sequence[str], out: Path | None, base: dict[str, str]) -> _Launch:
    missing: list[str] = []
    tasks, task, local = (
        _slurm_number(base, name, missing)
        for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    )
    if tasks in (None, 0, 1):
        task = None
    slurm_job = base.get("SLURM_JOB_ID")
    run_id = base.get("KANSOKU_RUN_ID")
    if run_id is None and task is not None:  # all tasks of the step share one run
        run_id = f"slurm-{slurm_job}-{base.get('SLURM_STEP_ID', '0')}"
    joins = run_id is not None
    run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    out = (out or Path("runs") / run_id).absolute()
    first = task in (None, 0)
    existing = out / "run.json"
    if existing.exists() and not joins:
        raise InputError(
            "this folder holds another run", where=str(out), remedy="choose another --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        payload = out / ".capture"
        write_payload(str(payload))
    except OSError as error:
        raise InputError(
            f"the folder cannot be written: {error.strerror}",
            where=str(out),
            remedy="choose another --out",
        ) from error
    node = base.get("KANSOKU_NODE") or os.uname().nodename
    ring_dir = Path(base.get("KANSOKU_RING_DIR") or "/dev/shm/kansoku") / run_id  # noqa: S108
    with contextlib.suppress(OSError):  # the recorder will find the same, and run without a ring
        make_ring_dir(ring_dir)
    facts = {
        "schema": "kansoku.run/1",
        "run": run_id,
        "command": list(command),
        "start_ns": time.time_ns(),
        "end_ns": None,
        "exit_code": None,
        "slurm_job": slurm_job,
        "nodes": [node],
        "ring_dir": str(ring_dir),
        "ring_node": os.uname().nodename,
        "ranks": [],
        "missing": missing,
    }
    return _Launch(
        out=out,
        run=run_id,
        node=node,
        ring_dir=ring_dir,
        payload=payload,
        facts=facts,
        disabled=base.get("KANSOKU_DISABLE") == "1",
        writes_json=first and not (joins and existing.exists()),
        drains=local in (None, 0) or task is None,
    )


def _slurm_number(base: Mapping[str, str], name: str, missing: list[str]) -> int | None:
    """Return a count or number of Slurm's; None where it is not set, or damaged, which is said."""
    text = base.get(name)
    if not text:
        return None
    if len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    missing.append(f"{name} is {text[:32]!r}, no number: taken as not set")
    return None


class _Signals:
    """Pass on what is sent to us.

    What is ignored here, as SIGHUP under nohup, stays ignored: a handler of ours would give it back
    to the job.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []
        self._previous: dict[int, Any] = {}
        try:  # before the job starts: one sent right after it must not end us alone
            for number in _FORWARDED:
                # Again where it is ignored: polars puts a handler of its own in at import, unseen.
                ignored = signal.getsignal(number) is signal.SIG_IGN
                handler = signal.SIG_IGN if ignored else self._pass_on
                self._previous[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: somebody else's signals
            pass

    def _pass_on(self, number: int, _: object) -> None:
        if number in _KEYBOARD and _has_terminal():
            return  # Ctrl-C: the terminal sends it to the job itself
        if self.child is None:
            self._waiting.append(number)
        else:
            self.child.send_signal(number)

    def deliver(self) -> None:
        """Pass on what came before there was a child."""
        while self._waiting and self.child is not None:
            self.child.send_signal(self._waiting.pop(0))

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _has_terminal() -> bool:
    """Say whether the keys of a terminal come to this process and the job."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _ended(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the end of a child, at most so long; say whether it has ended.

    ``Popen.wait`` with a timeout looks a hundred times a second, on a core that the job may want.
    """
    try:
        descriptor = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # no Linux, or an old one
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout_s)
        return child.returncode is not None
    try:
        waiting = select.poll()  # select() knows no descriptor above 1,023
        waiting.register(descriptor, select.POLLIN)
        waiting.poll(timeout_s * 1e3)
    finally:
        os.close(descriptor)
    return child.poll() is not None


def _watch(
    child: subprocess.Popen[bytes],
    launch: _Launch,
    live: LiveLine | None,
    say: Callable[[str], None] | None,
    say_every_s: float,
) -> None:
    next_live = time.monotonic() + say_every_s
    while True:
        launch.start_drain()
        if _ended(child, _POLL_S):
            return
        if live is not None and say is not None and time.monotonic() >= next_live:
            next_live = time.monotonic() + say_every_s
            _say_now(live, say)


def _say_now(live: LiveLine, say: Callable[[str], None]) -> None:
    try:
        line = live.read(time.monotonic_ns())
        if line:
            say(line)
    except Exception:  # noqa: BLE001 - a line is lost, as where stderr is full; the job goes on
        _log.info("no live line", exc_info=True)
