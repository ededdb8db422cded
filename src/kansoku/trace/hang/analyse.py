"""Who is to blame for a hang: mismatches, missing ranks, the wait-for graph, cycles.

Rank a waits for rank b if a has issued an operation that has not ended and b, a member of the same
group (or the peer of a send or receive), has not issued it. Ranks that others wait for and that
wait for nobody are the culprits, all of them: everybody else is stuck behind one. If following the
waits never reaches such a rank, the waits form a cycle: an ordering bug. If everybody issued
everything and nothing ends, the devices or the fabric between them stand still.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kansoku.trace.hang.record import Group, Operation, RankState

__all__ = ["Edge", "GroupFinding", "HangVerdict", "analyse_hang"]

# The input of these is the same on every member; a difference is a bug in the program.
_EQUAL_INPUTS = {
    "all_reduce", "allreduce", "reduce", "broadcast", "_all_gather_base", "all_gather_base",
    "allgather_base", "all_gather_into_tensor", "_allgather_base", "_reduce_scatter_base",
    "reduce_scatter_base", "reduce_scatter_tensor", "all_gather", "allgather", "reduce_scatter",
    "barrier", "all_reduce_barrier",
}  # fmt: skip
# Never compared: members may differ by right.
_UNEQUAL_DTYPES = {"barrier", "all_reduce_barrier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Rank ``waiter`` waits for rank ``waited``."""

    waiter: int
    waited: int
    group: str
    sequence: int | None
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinding:
    """One group with an operation that did not end."""

    group: str
    description: str | None
    ranks: tuple[int, ...]
    sequence: int | None
    """First collective that did not end on every member."""
    operation: str | None
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that did not issue it, or left no dump."""
    not_started: tuple[int, ...]
    """Members whose device did not begin it although another's did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """The answer."""

    verdict: str
    """``missing_ranks``, ``mismatch``, ``cycle``, ``device_or_fabric``, ``none``, ``unknown``."""
    reason: str
    culprits: tuple[int, ...]
    groups: tuple[GroupFinding, ...]
    edges: tuple[Edge, ...]
    evidence: tuple[str, ...]


def _named(ranks: Iterable[int]) -> str:
    """Write ranks as people do: ``rank 7``, ``ranks 0-3, 7``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    begin = 0
    for at in range(1, len(ordered) + 1):
        if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
            first, last = ordered[begin], ordered[at - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            begin = at
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def _all_groups(states: Mapping[int, RankState]) -> dict[str, Group]:
    """Join what the ranks know of each group; members come from whoever lists them.

    A group that no file lists has the members that used it.
    """
    known: dict[str, Group] = {}
    users: dict[str, set[int]] = defaultdict(set)
    for rank, state in states.items():
        for name, group in state.groups.items():
            if name not in known or len(group.ranks) > len(known[name].ranks):
                known[name] = group
        for name in (*state.status, *(o.group for o in state.operations)):
            users[name].add(rank)
    for name, ranks in users.items():
        if name not in known or not known[name].ranks:
            description = known[name].description if name in known else None
            known[name] = Group(name=name, description=description, ranks=tuple(sorted(ranks)))
    return known


class _Index:
    """Look-ups over all ranks' states."""

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self.states = states
        self.groups = _all_groups(states)
        self.collectives: dict[tuple[int, str, int], Operation] = {}
        self.p2p: dict[tuple[int, str], list[Operation]] = defaultdict(list)
        for rank, state in states.items():
            for operation in state.operations:
                if operation.sequence is not None:
                    self.collectives[rank, operation.group, operation.sequence] = operation
                elif operation.is_p2p:
                    self.p2p[rank, operation.group].append(operation)

    def entered(self, rank: int, group: str) -> int:
        """Return the last collective that the rank issued; -1 for none or no dump."""
        state = self.states.get(rank)
        status = state.status.get(group) if state else None
        return -1 if status is None else status.enqueued

    def completed(self, rank: int, group: str) -> int:
        state = self.states.get(rank)
        status = state.status.get(group) if state else None
        return -1 if status is None else status.completed

    def name(self, group: str, sequence: int) -> str | None:
        for rank in self.groups[group].ranks:
            operation = self.collectives.get((rank, group, sequence))
            if operation is not None:
                return operation.name
        return None


def _global_peer(index: _Index, operation: Operation) -> int | None:
    ranks = index.groups[operation.group].ranks
    if operation.peer is None or operation.peer >= len(ranks):
        return None
    return ranks[operation.peer]


def _p2p_edge(index: _Index, rank: int, operation: Operation) -> Edge | None:
    """Return the wait of an open send or receive, if its peer has not issued its half."""
    peer = _global_peer(index, operation)
    if peer is None or peer == rank:
        return None
    wanted = "recv" if operation.name == "send" else "send"
    halves = [
        other.p2p_sequence
        for other in index.p2p[peer, operation.group]
        if other.name == wanted and _global_peer(index, other) == rank
    ]
    mine = operation.p2p_sequence
    known = [half for half in halves if half is not None]
    if mine is None:
        issued = bool(halves)
    elif known:
        issued = max(known) >= mine
    else:
        # The peer's own counter of the group goes on after its entries are gone.
        issued = index.entered(peer, operation.group) >= mine
    if issued:
        return None
    return Edge(
        waiter=rank, waited=peer, group=operation.group, sequence=mine, operation=operation.name
    )


def _collective_edges(index: _Index, name: str) -> list[Edge]:
    ranks = index.groups[name].ranks
    entered = {rank: index.entered(rank, name) for rank in ranks}
    used = any(value >= 0 for value in entered.values())
    if not used:
        return []
    edges = []
    # In a group that only sends and receives, the counters count those; p2p edges say more.
    p2p_only = all(
        not any(o.sequence is not None and o.group == name for o in index.states[r].operations)
        for r in ranks
        if r in index.states
    ) and any(index.p2p[r, name] for r in ranks)
    if p2p_only and len(ranks) > 2:
        return []
    ordered = sorted(ranks, key=lambda rank: entered[rank])
    lowest = ordered[0]
    for rank in ranks:
        if rank not in index.states or entered[rank] <= index.completed(rank, name):
            continue
        # It waits in its first open collective for whoever has not come there.
        first_open = index.completed(rank, name) + 1
        if entered[lowest] >= entered[rank]:
            continue
        for other in ordered:
            if entered[other] >= entered[rank]:
                break
            if other not in index.states:
                continue
            at = max(first_open, entered[other] + 1)
            edges.append(
                Edge(
                    waiter=rank,
                    waited=other,
                    group=name,
                    sequence=at,
                    operation=index.name(name, at) or "collective",
                )
            )
    return edges


def _mismatches(index: _Index) -> tuple[list[str], set[int]]:
    """Compare what members issued under one sequence number; return sentences and odd ranks."""
    table: dict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
    for (rank, group, sequence), operation in index.collectives.items():
        if operation.state != "completed":
            table[group, sequence][rank] = operation
    sentences: list[str] = []
    culprits: set[int] = set()
    for (group, sequence), members in sorted(table.items(), key=lambda item: item[0][1]):
        for what, values in _comparisons(members):
            counts = Counter(values.values())
            if len(counts) < 2:
                continue
            # The rarer form is the odd one; in a tie all are named.
            most = max(counts.values())
            common = [value for value, count in counts.items() if count == most]
            odd = {r for r, v in values.items() if len(common) > 1 or v != common[0]}
            culprits |= odd
            forms = "; ".join(
                f"{_named(r for r, v in values.items() if v == value)}: {value}" for value in counts
            )
            sentences.append(
                f"group {_title(index.groups[group])} collective {sequence}: {what} differ: {forms}"
            )
            break
    return sentences, culprits


def _comparisons(
    members: Mapping[int, Operation],
) -> list[tuple[str, dict[int, object]]]:
    names: dict[int, object] = {rank: o.name for rank, o in members.items()}
    found = [("operations", names)]
    name = next(iter(members.values())).name
    if len(set(names.values())) == 1:
        if name not in _UNEQUAL_DTYPES:
            found.append(("data types", {rank: o.dtypes for rank, o in members.items()}))
        if name in _EQUAL_INPUTS:
            found.append(("sizes", {rank: _elements(o) for rank, o in members.items()}))
    return found


def _elements(operation: Operation) -> tuple[int, ...]:
    """Return the number of elements of each input; shapes may differ, volumes may not."""
    counts = []
    for size in operation.input_sizes:
        total = 1
        for extent in size:
            total *= extent
        counts.append(total)
    return tuple(counts)


def _title(group: Group) -> str:
    return f"{group.name} ({group.description})" if group.description else group.name


def _sinks(edges: Sequence[Edge]) -> tuple[set[int], list[set[int]]]:
    """Return the ranks waited for that wait for nobody, and the cycles without a way out."""
    graph: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        graph[edge.waiter].add(edge.waited)
        graph.setdefault(edge.waited, set())
    sinks, cycles = set(), []
    for component in _components(graph):
        leaves = {b for a in component for b in graph[a]} - component
        if leaves:
            continue
        if len(component) == 1:
            sinks |= component
        else:
            cycles.append(component)
    return sinks, cycles


def _components(graph: Mapping[int, set[int]]) -> list[set[int]]:
    """Return the strongly connected components (Tarjan, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[set[int]] = []
    for root in graph:
        if root in order:
            continue
        work = [(root, iter(graph[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            advanced = False
            for child in rest:
                if child not in order:
                    order[child] = low[child] = len(order)
                    stack.append(child)
                    on_stack.add(child)
                    work.append((child, iter(graph[child])))
                    advanced = True
                    break
                if child in on_stack:
                    low[node] = min(low[node], order[child])
            if advanced:
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == order[node]:
                component = set()
                while True:
                    member = stack.pop()
                    on_stack.discard(member)
                    component.add(member)
                    if member == node:
                        break
                found.append(component)
    return found


def _group_finding(index: _Index, group: Group) -> GroupFinding | None:
    open_on = [
        r for r in group.ranks if index.entered(r, group.name) > index.completed(r, group.name)
    ]
    if not open_on:
        return None
    reached = [index.entered(r, group.name) for r in group.ranks if r in index.states]
    sequence = min(index.completed(rank, group.name) for rank in open_on) + 1
    if min(reached) < max(reached):
        # Somebody is behind: the collective that it did not enter says more than the first open.
        sequence = max(sequence, min(reached) + 1)
    entered = tuple(r for r in group.ranks if index.entered(r, group.name) >= sequence)
    started = [
        r
        for r in group.ranks
        if (o := index.collectives.get((r, group.name, sequence))) and o.state == "started"
    ]
    waiting = tuple(
        r
        for r in group.ranks
        if (o := index.collectives.get((r, group.name, sequence))) and o.state == "scheduled"
    )
    return GroupFinding(
        group=group.name,
        description=group.description,
        ranks=group.ranks,
        sequence=sequence,
        operation=index.name(group.name, sequence),
        entered=entered,
        missing=tuple(r for r in group.ranks if r not in entered),
        not_started=waiting if started else (),
    )


def _expected(index: _Index) -> set[int]:
    return {rank for group in index.groups.values() for rank in group.ranks}


def _silent_in_the_way(index: _Index, findings: Sequence[GroupFinding]) -> set[int]:
    """Return ranks without a dump that are members of a group that did not end.

    Where most ranks left no dump, the files were not collected; nobody is blamed for that.
    """
    expected = _expected(index)
    silent = expected - index.states.keys()
    if len(silent) * 2 > len(expected):
        return set()
    return silent & {rank for finding in findings for rank in finding.ranks}


def analyse_hang(states: Sequence[RankState]) -> HangVerdict:
    """Return who is to blame for a hang; a rank without a state is evidence too."""
    by_rank = {state.rank: state for state in states}
    if not by_rank:
        return HangVerdict(
            verdict="unknown",
            reason="no readable dump",
            culprits=(),
            groups=(),
            edges=(),
            evidence=(),
        )
    index = _Index(by_rank)
    findings = [f for group in index.groups.values() if (f := _group_finding(index, group))]
    findings.sort(key=lambda f: (not f.missing, len(f.ranks), f.group))
    silent = _silent_in_the_way(index, findings)
    unseen = _expected(index) - by_rank.keys()
    evidence = [f"{_named(unseen)} left no dump"] if unseen else []
    sentences, odd = _mismatches(index)
    edges = [edge for name in index.groups for edge in _collective_edges(index, name)]
    for (rank, _), operations in list(index.p2p.items()):
        for operation in operations:
            if operation.state != "completed":
                edge = _p2p_edge(index, rank, operation)
                if edge is not None:
                    edges.append(edge)

    def answer(verdict: str, reason: str, culprits: Iterable[int]) -> HangVerdict:
        return HangVerdict(
            verdict=verdict,
            reason=reason,
            culprits=tuple(sorted(culprits)),
            groups=tuple(findings),
            edges=tuple(edges),
            evidence=tuple(evidence),
        )

    if odd:
        evidence += sentences
        return answer("mismatch", sentences[0], odd)
    sinks, cycles = _sinks(edges)
    if sinks or silent:
        culprits = sinks | silent
        evidence += _waits(edges, sinks)
        words = "has" if len(culprits) == 1 else "have"
        how = "not entered what the others wait in"
        if silent:
            how += f" ({_named(silent)} left no dump)"
        return answer("missing_ranks", f"{_named(culprits)} {words} {how}", culprits)
    if cycles:
        cycle = min(cycles, key=len)
        evidence += _waits([e for e in edges if e.waiter in cycle and e.waited in cycle], cycle)
        return answer(
            "cycle",
            f"{_named(cycle)} wait for each other: they issue collectives of different "
            "groups in different order",
            set().union(*cycles),
        )
    if findings or any(o.state != "completed" for ops in index.p2p.values() for o in ops):
        lagging = {rank for finding in findings for rank in finding.not_started}
        if lagging:
            evidence.append(f"the device of {_named(lagging)} has not begun what others run")
        return answer(
            "device_or_fabric",
            "every rank issued the operation and it does not end: a device or the fabric stands "
            "still",
            lagging,
        )
    if unseen:
        return answer("unknown", "every dump is complete, but some ranks left none", ())
    return answer("none", "every operation in the dumps has ended", ())


def _waits(edges: Sequence[Edge], waited: set[int]) -> list[str]:
    """Say for each rank waited for, where and by whom, most waiters first."""
    table: dict[tuple[int, str, int | None, str], set[int]] = defaultdict(set)
    for edge in edges:
        if edge.waited in waited:
            table[edge.waited, edge.group, edge.sequence, edge.operation].add(edge.waiter)
    lines = []
    for rank in sorted(waited):
        rows = [(key, waiters) for key, waiters in table.items() if key[0] == rank]
        rows.sort(key=lambda row: -len(row[1]))
        for (_, group, sequence, operation), waiters in rows[:3]:
            lines.append(
                f"rank {rank} is waited for by {_named(waiters)} in group {group}, "
                f"{operation} {'' if sequence is None else sequence}".rstrip()
            )
    return lines
