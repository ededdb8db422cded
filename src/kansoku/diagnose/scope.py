"""Correct domain and subject of observations by how wide they are seen and what explains them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kansoku.diagnose.context import Context, is_elsewhere
from kansoku.diagnose.daemons import TOLD_OF_LOSS
from kansoku.diagnose.kinds import NUMERICS
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.timing import slow_since, time_weight
from kansoku.model import Domain

__all__ = ["by_scope"]

_NARROW = {"pcie-degraded", "metric:PCIe link width or generation"}
_OWN_LIMITS = {"host memory limit", "kubernetes memory limit"}


def _of_device_or_daemon(one: Observation, policy: Policy, *, daemon_died: bool) -> Observation:
    """Correct what the scheduler's daemon or a shared device explains better."""
    if daemon_died and one.rule in {"node-lost", "sch-state-node-fail"}:
        return replace(one, role="cascade")  # the daemon died, not its node
    if (
        one.rule.startswith("xid.")
        and one.domain is Domain.APPLICATION
        and one.programs >= policy.other_programs
    ):
        # One device in the hands of several programs: the device is what they share.
        return replace(one, domain=Domain.GPU_HARDWARE, component="gpu", role="root")
    return one


def _without_space(seen: Iterable[Observation]) -> frozenset[int | None]:
    """Return the ranks that had no space or quota left to write."""
    return frozenset(o.rank for o in seen if o.rule in {"app-disk-full", "app-quota"})


def _accused(seen: Iterable[Observation]) -> str | None:
    """Return the peer that most of several complaining nodes cannot reach."""
    by_peer: dict[str, set[str]] = defaultdict(set)
    nodes = set()
    for one in seen:
        if one.domain is Domain.NETWORK and one.role == "either" and one.node and one.target:
            by_peer[one.target].add(one.node)
            nodes.add(one.node)
    if len(nodes) < 2:
        return None
    peer = max(by_peer, key=lambda p: len(by_peer[p]))
    mine = len(by_peer[peer] - {peer})
    alike = [p for p in by_peer if p != peer and len(by_peer[p]) >= mine]
    return peer if mine >= 2 and 2 * mine > len(nodes) and not alike else None


def _set_up_otherwise(seen: Iterable[Observation], context: Context) -> str | None:
    """Return the node that alone fails at start-up and alone is set up otherwise than its peers.

    The same line in the middle of a run would be the job's own.
    """
    if context.progress.latest_ns is not None or len(context.nodes) < 2:
        return None
    failing, odd = set(), set()
    for one in seen:
        if one.rule == "odd-configuration":
            odd.add(one.node)
        elif one.role == "either" and one.domain is Domain.APPLICATION:
            failing.add(one.node)
    return next(iter(failing)) if len(failing) == 1 and failing <= odd else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What all observations together say that corrects single ones."""

    lost: bool
    """The scheduler lost a node, or one fell silent."""
    corrupts: bool
    """A device gives wrong numbers."""
    daemon_died: bool
    """A node's daemon alone was silent."""
    narrow: Mapping[str | None, Observation]
    """The narrow link of a node, read with its device."""
    driverless: frozenset[str | None]
    """Nodes without a driver."""
    full: frozenset[int | None]
    """Ranks without space to write."""
    limited: frozenset[str | None]
    """Nodes where the job met its own memory limit."""
    broken: frozenset[str | None]
    """Nodes whose GPUs or set-up complain: a crash there is the consequence."""
    dead: frozenset[str]
    """Nodes that died, by themselves or by the scheduler's word."""
    accused: str | None
    """The peer that most complain of."""
    clients: Mapping[str, set[str]]
    """Nodes that complain of a storage target."""
    targets: Mapping[str, set[str]]
    """Storage targets that a node complains of."""


def _storage_ways(seen: Iterable[Observation]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the clients of each storage target that is complained of, and the reverse."""
    clients: dict[str, set[str]] = defaultdict(set)
    targets: dict[str, set[str]] = defaultdict(set)
    for one in seen:
        if one.domain is Domain.STORAGE and one.target and one.node:
            clients[one.target].add(one.node)
            targets[one.node].add(one.target)
    return clients, targets


def _corrupts(seen: Iterable[Observation], onset_ns: int | None, policy: Policy) -> bool:
    """Say whether a device gives wrong numbers about now.

    A repeat of the step comes after the NaN that it explains.
    """
    return any(
        o.component == "silent corruption"
        and o.role == "root"
        and onset_ns is not None
        and abs((o.time_ns or onset_ns) - onset_ns) <= policy.old_ns
        for o in seen
    )


def _known(
    seen: Sequence[Observation], onset_ns: int | None, context: Context, policy: Policy
) -> _Known:
    """Gather what corrects single observations; what is old or elsewhere accuses nobody."""
    slow_ns = slow_since(seen)
    present = [
        o
        for o in seen
        if time_weight(o, onset_ns, context, policy, slow_ns)[1] is None
        and not is_elsewhere(o, context)
    ]
    hardware = {
        o.node
        for o in present
        if o.domain is Domain.GPU_HARDWARE and o.role == "root" and o.strength >= 0.7
    }
    clients, targets = _storage_ways(seen)
    return _Known(
        lost=any(o.rule in {"node-lost", "silence.node"} for o in seen),
        corrupts=_corrupts(seen, onset_ns, policy),
        daemon_died=any(o.component == "node daemon" for o in seen),
        narrow={o.node: o for o in seen if o.rule in _NARROW and o.device and o.node},
        driverless=frozenset(
            o.node for o in seen if o.domain is Domain.HOST and o.component == "driver" and o.node
        ),
        full=_without_space(present),
        limited=frozenset(o.node for o in seen if o.component in _OWN_LIMITS and o.role == "root"),
        broken=frozenset(hardware | {_set_up_otherwise(present, context)}) - {None},
        dead=frozenset(
            o.node
            for o in present
            if o.node
            and o.domain in {Domain.HOST, Domain.GPU_HARDWARE}
            and (o.role == "root" or o.rule == "node-lost")
        ),
        accused=_accused(present),
        clients=clients,
        targets=targets,
    )


def _explained(one: Observation, known: _Known) -> Observation:
    """Return an observation as the consequence, or the place, that another has told."""
    if known.lost and one.rule in TOLD_OF_LOSS:
        return replace(one, role="cascade")
    if known.corrupts and one.rule in NUMERICS and one.domain is Domain.APPLICATION:
        # Wrong numbers that a repeat does not give are the device's: NaN is what it made.
        return replace(one, role="cascade")
    if one.rule == "app-ckpt-corrupt" and one.rank in known.full:
        return replace(one, role="symptom")  # the file was cut off where the space ended
    if one.component == "driver" and one.node in known.driverless:
        # A tool that cannot reach the GPU has no driver to ask.
        return replace(one, domain=Domain.HOST)
    if one.component == "pcie" and one.node in known.narrow and not one.device:
        # The same line, read with the device that it belongs to.
        link = known.narrow[one.node]
        return replace(one, domain=link.domain, device=link.device)
    return one


def _by_storage_way(one: Observation, known: _Known, context: Context) -> Observation:
    """Correct a storage complaint by how many clients and targets share it."""
    if not (one.node and one.target):
        return one
    targets = len(known.targets[one.node])
    if len(known.clients[one.target]) > 1 or targets < 2:
        return one
    # One client that loses many targets has lost its own way to them.
    new = replace(one, target=None)
    if targets > 2 and len(context.job_nodes or context.nodes) > 1:
        # Its peers reach the same servers: the way is what is broken.
        new = replace(new, domain=Domain.NETWORK, component="path to the storage")
    return new


def _by_place(one: Observation, known: _Known, context: Context) -> Observation:
    """Correct an observation by what else is known of its node and of whom it complains of."""
    if one.rule == "host-oom-killer" and one.node in known.limited:
        # The kernel tells the limit that was hit in another line of the same kill.
        return replace(one, domain=Domain.APPLICATION, component="host memory limit")
    if one.rule in {"app-sigkill", "rank.gone"} and known.limited:
        # The kill is known: it was the job's own limit.
        return replace(one, role="cascade")
    if (
        one.role == "either"
        and one.domain is Domain.APPLICATION
        and one.node in known.broken
        and one.rule != "odd-configuration"
    ):
        # The node's hardware or set-up complains too: the crash is its consequence.
        return replace(one, role="symptom")
    if one.role == "either" and one.domain is Domain.NETWORK and known.dead:
        # A peer that died first looks like a network that lost it.
        return replace(one, role="symptom" if one.node not in known.dead else "cascade")
    if one.domain is Domain.NETWORK and known.accused and one.target == known.accused:
        # Those that wait for one peer are its victims.
        return replace(one, node=known.accused, rank=None, device=None)
    if one.domain is Domain.STORAGE:
        return _by_storage_way(one, known, context)
    return one


def by_scope(
    seen: Sequence[Observation], onset_ns: int | None, context: Context, policy: Policy
) -> list[Observation]:
    """Correct domain and subject of observations by how wide they are seen."""
    known = _known(seen, onset_ns, context, policy)
    changed = []
    for one in seen:
        new = _explained(one, known)
        if new is one:
            new = _of_device_or_daemon(one, policy, daemon_died=known.daemon_died)
        if new is one:
            new = _by_place(one, known, context)
        changed.append(new)
    return changed
