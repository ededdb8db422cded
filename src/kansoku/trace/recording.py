"""When each process of a job is told to record, so that all record at the same time.

A process asks every five seconds and gets one answer. For a stretch of time the answer names the
start on the common clock. For steps it names a multiple of steps; processes that ask on both sides
of such a multiple would take different ones, so the answers are given in one round, begun after the
longest pause between any two askers.

Where no daemon was before, a process may be in its tenth, slowest attempt to reach one: it comes up
to ten seconds late, and keeps its rhythm only from its second question on.
"""

from dataclasses import dataclass, field, replace

from kansoku.errors import InputError

__all__ = ["MARGIN_NS", "POLL_INTERVAL_NS", "Plan", "Round", "Target", "version_is_safe"]

POLL_INTERVAL_NS = 5_000_000_000
"""How often Kineto asks (its default; the job cannot be told otherwise from outside)."""
WARM_UP_NS = 2_000_000_000
# Asking, reading the answer and its thread's own interval of a second.
MARGIN_NS = 2_000_000_000
_FIRST_SAFE = (2, 10)


def version_is_safe(version: str | None) -> bool | None:
    """Return whether this torch answers requests without the start-up race; None: unknown.

    Until 2.9 two threads created Kineto's client, and one used the other's after it was freed:
    crashes at random (pytorch issue 163545, kineto pull request 1157).
    """
    parts = (version or "").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return (int(parts[0]), int(parts[1])) >= _FIRST_SAFE


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One process to record."""

    pid: int
    rank: int | None
    file: str
    """Where it is told to write; it puts ``_PID`` before the ``.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to record: steps or milliseconds."""

    steps: int | None = None
    duration_ms: int | None = None
    start_ns: int | None = None
    """Unix time at which a stretch of milliseconds begins; None: as soon as all can."""
    round_up: int = 1
    """Steps begin at a multiple of this."""
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.duration_ms is None):
            raise InputError("give either steps or milliseconds", where="--steps, --duration-ms")
        given = [one for one in (self.steps, self.duration_ms, self.round_up) if one is not None]
        if min(given) < 1:
            raise InputError("steps, milliseconds and the multiple must be positive")

    def config(self, file: str) -> str:
        """Return the text that Kineto reads. Keys: libkineto's ``Config.cpp``."""
        if "\n" in file:
            raise InputError("a line break in the file's name", where=file)
        lines = [f"ACTIVITIES_LOG_FILE={file}"]
        if self.steps is not None:
            lines += [
                "PROFILE_START_ITERATION=0",
                f"PROFILE_START_ITERATION_ROUNDUP={self.round_up}",
                f"ACTIVITIES_ITERATIONS={self.steps}",
            ]
        else:
            lines += [
                f"ACTIVITIES_WARMUP_PERIOD_SECS={WARM_UP_NS // 1_000_000_000}",
                f"PROFILE_START_TIME={(self.start_ns or 0) // 1_000_000}",
                f"ACTIVITIES_DURATION_MSECS={self.duration_ms}",
            ]
        switches = {
            "PROFILE_REPORT_INPUT_SHAPES": self.shapes,
            "PROFILE_PROFILE_MEMORY": self.memory,
            "PROFILE_WITH_STACK": self.stacks,
            "PROFILE_WITH_FLOPS": self.flops,
            "PROFILE_WITH_MODULES": self.modules,
        }
        lines += [f"{key}={'true' if on else 'false'}" for key, on in switches.items()]
        return "\n".join(lines)

    @staticmethod
    def earliest_start(now_ns: int, margin_ns: int = MARGIN_NS) -> int:
        """Return the first start that every process can still keep."""
        return now_ns + POLL_INTERVAL_NS + margin_ns + WARM_UP_NS


@dataclass(slots=True)
class Round:
    """Who has asked, and who gets the answer now."""

    plan: Plan
    targets: dict[int, Target]
    """By pid."""
    asked_ns: dict[int, list[int]] = field(default_factory=dict)
    """Monotonic times."""
    told_ns: dict[int, int] = field(default_factory=dict)
    """Monotonic times."""
    margin_ns: int = MARGIN_NS
    """How much later than after five seconds a busy process may ask again."""
    late: set[int] = field(default_factory=set)
    """Who asked when the start was too near: Kineto would drop the request."""
    _first: int | None = None
    _open: bool = False

    def on_request(self, pid: int, *, now_ns: int, unix_ns: int) -> str:
        """Return the configuration for this process; empty: not now."""
        self.asked_ns.setdefault(pid, []).append(now_ns)
        target = self.targets.get(pid)
        if target is None or pid in self.told_ns or not self._may_tell(pid, unix_ns):
            return ""
        if self.plan.start_ns is not None and unix_ns > self.plan.start_ns - WARM_UP_NS:
            self.late.add(pid)
            return ""
        self.told_ns[pid] = now_ns
        return self.plan.config(target.file)

    def _may_tell(self, pid: int, unix_ns: int) -> bool:
        if self._open:
            return True
        if self.plan.steps is None:
            if not self.silent(1):
                self._open = True
                soonest = Plan.earliest_start(unix_ns, self.margin_ns)
                self.plan = replace(self.plan, start_ns=max(self.plan.start_ns or 0, soonest))
            return self._open
        if self._first is None and not self.silent(2):
            self._first = self._leader()
        self._open = pid == self._first
        return self._open

    def _leader(self) -> int:
        """Return the process after the longest pause in the cycle of asking."""
        times = sorted((self.asked_ns[pid][-1] % POLL_INTERVAL_NS, pid) for pid in self.targets)
        pauses = [
            ((when - times[number - 1][0]) % POLL_INTERVAL_NS or POLL_INTERVAL_NS, pid)
            for number, (when, pid) in enumerate(times)
        ]
        return max(pauses)[1]

    def silent(self, times: int = 1) -> list[int]:
        """Return the targets that have asked less often."""
        return [pid for pid in self.targets if len(self.asked_ns.get(pid, ())) < times]

    def give_up(self, pid: int) -> None:
        """Do not wait for this one any more."""
        self.targets.pop(pid, None)
        if self._first == pid:
            self._first = None

    @property
    def complete(self) -> bool:
        """Whether everybody has been told."""
        return all(pid in self.told_ns for pid in self.targets)

    @property
    def spread_ns(self) -> int:
        """Between the first and the last answer."""
        return max(self.told_ns.values()) - min(self.told_ns.values()) if self.told_ns else 0

    def expected_end_ns(self, now_ns: int, unix_ns: int) -> int | None:
        """Return the monotonic time at which a stretch of milliseconds is over; None: steps."""
        if self.plan.start_ns is None or self.plan.duration_ms is None or not self._open:
            return None
        return now_ns + self.plan.start_ns - unix_ns + self.plan.duration_ms * 1_000_000
