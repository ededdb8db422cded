"""What a kansoku run and Flight Recorder dumps say, as observations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kansoku.app.diagnose._expected import beyond_expected
from kansoku.app.diagnose._slowed import slowed
from kansoku.app.report import LoadedRun, load_run, report
from kansoku.app.report._states import RankState
from kansoku.app.trace_hang import HangReport, hang
from kansoku.diagnose.observation import Observation
from kansoku.errors import InputError
from kansoku.model import Domain, Phase
from kansoku.trace.stragglers import Straggler

__all__ = ["observe_dumps", "observe_run", "of_hang", "straggler_observation"]

_SECOND = 1_000_000_000
_QUIET_NS = 5 * _SECOND
"""A rank without a sign of life for this long while others wrote is stopped or starved."""


def _observation(rule: str, text: str, source: str, **more: object) -> Observation:
    facts: dict[str, object] = {"meaning": "", "action": "", "kind": "trace"} | more
    return Observation(rule=rule, text=text, source=source, **facts)  # type: ignore[arg-type]


_CULPRITS_SHOWN = 16
# What a hang's verdict says of whose fault it is: domain, part, role, strength, only where.
_HANGS: Mapping[str, tuple[Domain, str, str, float, bool]] = {
    "missing_ranks": (Domain.APPLICATION, "unequal work of ranks", "either", 0.6, True),
    "mismatch": (Domain.FRAMEWORK, "divergent collectives", "root", 0.8, False),
    "cycle": (Domain.APPLICATION, "order of collectives", "root", 0.85, False),
    "device_or_fabric": (Domain.NETWORK, "transfer that never ends", "either", 0.25, False),
}


def of_hang(
    verdict: str, reason: str, culprits: Sequence[int], *, source: str, time_ns: int | None = None
) -> list[Observation]:
    """Return a hang's verdict as observations, one for each culprit."""
    if verdict not in _HANGS:
        return []
    domain, component, role, strength, locates = _HANGS[verdict]
    # Rank by rank where they were named; a cycle or fabric is nobody's alone.
    ranks: list[int | None] = [*culprits[:_CULPRITS_SHOWN]]
    if verdict in {"cycle", "device_or_fabric"} or not ranks:
        ranks = [None]
    return [
        _observation(
            f"hang.{verdict}",
            reason,
            source,
            domain=domain,
            component=component,
            role=role,
            strength=strength,
            locates=locates,
            rank=rank,
            time_ns=time_ns,
            action="compare the code path of this rank with the others' at that collective",
        )
        for rank in ranks
    ]


def observe_dumps(dumps: Sequence[Path]) -> tuple[list[Observation], HangReport | None, list[str]]:
    """Return what Flight Recorder dumps say, and what could not be read."""
    try:
        answer = hang(list(dumps))
    except InputError as error:
        return [], None, [str(error)]
    verdict = answer.verdict
    times = [
        operation.created_ns
        for state in answer.states
        for operation in state.operations
        if operation.state != "completed" and operation.created_ns
    ]
    found = of_hang(
        verdict.verdict,
        verdict.reason,
        verdict.culprits,
        source=f"{len(answer.states)} Flight Recorder dumps",
        time_ns=min(times, default=None),
    )
    return found, answer, list(answer.unreadable)


def observe_run(
    path: Path, *, planned: bool = False
) -> tuple[list[Observation], LoadedRun, dict[int, str], list[str]]:
    """Return what a run says, the run, each rank's node, and what is missing; raise InputError.

    ``planned``: a plan of the steps is at hand, so none is made.
    """
    run = load_run(path)
    answer = report(run)
    nodes = run.facts.node_of_rank
    found = [_of_straggler(s, run, nodes) for s in answer.stragglers.stragglers]
    found += slowed(answer)
    beyond, missing = ([], []) if planned else beyond_expected(answer)
    found += beyond
    if answer.box.stopped:
        found += _of_end(answer.box.ranks, nodes)
        for blocked in answer.box.blocked[:4]:
            found += _of_blocked(blocked, {r.rank: r for r in answer.box.ranks}, nodes)
    return found, run, nodes, missing


def _of_straggler(s: Straggler, run: LoadedRun, nodes: Mapping[int, str]) -> Observation:
    facts = {r.rank: r for r in run.facts.ranks}
    starts = run.steps.filter((run.steps["rank"] == s.rank) & (run.steps["step"] == s.from_step))
    return straggler_observation(
        s,
        gpu=s.rank in facts and (facts[s.rank].device or "cpu") != "cpu",
        node=nodes.get(s.rank),
        time_ns=int(starts["start_ns"][0]) if len(starts) else None,
    )


def straggler_observation(
    s: Straggler, *, gpu: bool, node: str | None, time_ns: int | None
) -> Observation:
    """Return a straggler as an observation; ``gpu``: its work runs on a GPU."""
    share = 1.0 if s.cpu_share is None else s.cpu_share
    if s.cause == "cpu_contention":
        domain, component = Domain.HOST, "cpu taken by others"
    elif s.cause == "garbage_collection":
        domain, component = Domain.APPLICATION, "garbage collection"
    elif s.phase is Phase.DATA_WAIT:
        # Reading that takes CPU time is the program's; reading that waits is the storage's.
        waits = s.cpu_share is None or share < 0.5
        domain = Domain.STORAGE if waits else Domain.APPLICATION
        component = "data loading"
    elif s.phase is Phase.CHECKPOINT:
        domain, component = Domain.STORAGE, "checkpoint"
    elif gpu:
        domain, component = Domain.GPU_HARDWARE, "slow gpu"
    elif share >= 0.5:
        domain, component = Domain.APPLICATION, "more work than its peers"
    else:
        domain, component = Domain.HOST, "slow rank"
    return _observation(
        "finding.straggler",
        f"rank {s.rank} is slow in {s.phase.value}: its own work takes {s.ratio:.2f} times its "
        f"peers', {s.excess_ns / 1e6:.1f} ms a step, in {s.persistence:.0%} of the windows",
        f"steps {s.from_step}-{s.to_step}",
        domain=domain,
        component=component,
        role="either",
        strength=min(0.9, s.confidence),
        rank=s.rank,
        node=node,
        time_ns=time_ns,
    )


def _of_end(ranks: Sequence[RankState], nodes: Mapping[int, str]) -> list[Observation]:
    """Ranks that died without a word, or fell silent while the others went on."""
    found = []
    gone = [r for r in ranks if r.process == "gone"]
    if gone and len(gone) < max(2, len(ranks)):
        found += [
            _observation(
                "rank.gone",
                f"rank {r.rank} ended without closing its record, as after SIGKILL or a crash",
                f"ring of pid {r.pid}",
                domain=Domain.HOST,
                component="process killed",
                role="either",
                strength=0.6,
                locates=True,
                rank=r.rank,
                node=nodes.get(r.rank),
                time_ns=r.alive_ns,
                action="look for the kernel's OOM killer, a core dump, or who sent the signal",
            )
            for r in gone[:_CULPRITS_SHOWN]
        ]
    return found


def _of_blocked(
    blocked: object, states: Mapping[int, RankState], nodes: Mapping[int, str]
) -> list[Observation]:
    missing: Sequence[int] = blocked.missing  # type: ignore[attr-defined]
    waiting: Sequence[int] = blocked.waiting  # type: ignore[attr-defined]
    name = f"{blocked.op} {blocked.sequence} of group {blocked.group}"  # type: ignore[attr-defined]
    entered: int = blocked.entered_ns  # type: ignore[attr-defined]
    found = _of_all_inside(name, waiting, entered, states) if not missing else []
    waiters = "1 rank waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    for rank in missing[:_CULPRITS_SHOWN]:
        state = states.get(rank)
        kind = state.state.kind if state else None
        domain, component, locates, strength = _HANGS["missing_ranks"][0], "", True, 0.6
        component = "unequal work of ranks"
        if state is not None and state.process == "ended":
            text = f"rank {rank} has ended while {waiters} in {name}"
            locates, strength = False, 0.8
        elif kind == "data_wait":
            text = f"rank {rank} waits for data while {waiters} in {name}"
            domain, component, locates = Domain.STORAGE, "data loading", False
        elif kind == "checkpoint":
            text = f"rank {rank} is in a checkpoint while {waiters} in {name}"
            domain, component, locates = Domain.STORAGE, "checkpoint", False
        elif kind == "collective":
            text = (
                f"rank {rank} is in {state.state.name} {state.state.sequence} of group "  # type: ignore[union-attr]
                f"{state.state.group} while {waiters} in {name}"  # type: ignore[union-attr]
            )
            component, locates, strength = "divergent collectives", False, 0.7
        elif _stopped(state):
            text = f"rank {rank} is stopped (SIGSTOP) while {waiters} in {name}"
            domain, component, locates, strength = Domain.HOST, "process stopped", False, 0.9
        else:
            doing = "between phases" if kind is None else f"in {kind}"
            text = f"rank {rank} is {doing} while {waiters} for it in {name}"
        found.append(
            _observation(
                "hang.blocked", text, "open spans", domain=domain, component=component,
                role="either", strength=strength, locates=locates, rank=rank,
                node=nodes.get(rank), time_ns=entered,
            )
        )  # fmt: skip
    return found


def _of_all_inside(
    name: str, waiting: Sequence[int], entered_ns: int, states: Mapping[int, RankState]
) -> list[Observation]:
    """Say that nobody is missing and yet nothing moves; only of processes that still run."""
    inside = [states[rank] for rank in waiting if rank in states]
    held = [s.duration_ns or 0 for s in inside if s.process == "running"]
    if len(held) < max(2, len(waiting)) or min(held) < _QUIET_NS:
        return []
    verdict = "device_or_fabric"
    domain, component, role, strength, _ = _HANGS[verdict]
    return [
        _observation(
            f"hang.{verdict}",
            f"all {len(waiting)} ranks are in {name} for {min(held) / _SECOND:.0f} s and more: "
            "none is missing, the transfer does not end",
            "open spans", domain=domain, component=component, role=role, strength=strength,
            time_ns=entered_ns,
            action="compare the links, error counters and probes of these ranks' nodes",
        )
    ]  # fmt: skip


def _stopped(state: RankState | None) -> bool:
    """Say whether the kernel holds a live process stopped; only on its own machine."""
    if state is None or state.process != "running" or state.pid is None:
        return False
    try:
        text = Path(f"/proc/{state.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])
