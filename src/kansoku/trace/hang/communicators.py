"""From NCCL's own word on its communicators to ranks' states.

NCCL counts what was launched, not what has ended. What every member has launched can have ended; a
member that launched more waits for the others. With a member that does not answer, the last
operation of all cannot have ended either.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kansoku.formats.nccl_communicators import Communicator, Launch, Member
from kansoku.trace.hang.record import Group, Operation, RankState, Status

__all__ = ["advanced", "join_communicators", "states_of_communicators"]


def join_communicators(parts: Sequence[Communicator]) -> list[Communicator]:
    """Join what several logs say of one communicator; later files win."""
    joined: dict[str, Communicator] = {}
    for part in parts:
        known = joined.get(part.name)
        if known is None:
            joined[part.name] = part
            continue
        members = {member.rank: member for member in (*known.members, *part.members)}
        joined[part.name] = Communicator(
            name=part.name,
            size=part.size,
            members=tuple(members[rank] for rank in sorted(members)),
            others_launched=part.others_launched,
        )
    return list(joined.values())


def advanced(first: Sequence[Communicator], last: Sequence[Communicator]) -> bool:
    """Return whether the slowest member of any communicator launched more between snapshots."""
    before = {one.name: _least(one) for one in first}
    return any(
        one.name in before
        and (least := _least(one)) is not None
        and (earlier := before[one.name]) is not None
        and least > earlier
        for one in last
    )


def _least(one: Communicator) -> int | None:
    counts = [member.launched for member in one.members if member.launched is not None]
    if one.others_launched is not None and len(one.members) < one.size:
        counts.append(one.others_launched)
    return min(counts, default=None)


def states_of_communicators(
    communicators: Sequence[Communicator], *, file: str
) -> tuple[list[RankState], list[str]]:
    """Return one state per rank that answered, and remarks.

    A rank of the job is its place in the largest communicator; processes join the others to it.
    """
    if not communicators:
        return [], []
    world = max(communicators, key=lambda one: (one.size, len(one.members)))
    ranks = {m.process: m.rank for m in world.members if m.process is not None}
    groups: dict[int, dict[str, Group]] = defaultdict(dict)
    status: dict[int, dict[str, Status]] = defaultdict(dict)
    operations: dict[int, list[Operation]] = defaultdict(list)
    remarks: list[str] = []
    for one in communicators:
        members = _everybody(one)
        places = _places(one, members, ranks, world.size)
        unplaced = [rank for rank in range(one.size) if rank not in places]
        if unplaced and one.size < world.size:
            remarks.append(
                f"communicator {one.name} of {one.size}: {len(unplaced)} of its ranks cannot be "
                "told from the report"
            )
        group = Group(
            name=one.name,
            description=f"{one.size} ranks",
            ranks=tuple(places.get(rank, -1) for rank in range(one.size))
            if not unplaced
            else tuple(sorted(places.values())),
        )
        remarks += [
            f"rank {places.get(m.rank, m.rank)} in communicator {one.name}: {m.note}"
            for m in members.values()
            if m.note
        ]
        ended = _ended(one, members)
        for rank, member in members.items():
            place = places.get(rank)
            if place is None or member.launched is None:
                continue
            groups[place][one.name] = group
            status[place][one.name] = Status(
                enqueued=member.launched, completed=min(member.launched, ended)
            )
            operations[place] += [
                _operation(one.name, launch, ended)
                for launch in member.launches
                if launch.number >= ended
            ]
    states = [
        RankState(
            rank=rank,
            file=file,
            groups=groups[rank],
            status=status[rank],
            operations=tuple(operations[rank]),
        )
        for rank in sorted(status)
    ]
    return states, remarks


def _everybody(one: Communicator) -> dict[int, Member]:
    members = {member.rank: member for member in one.members}
    if one.others_launched is not None:
        for rank in range(one.size):
            members.setdefault(rank, Member(rank=rank, process=None, launched=one.others_launched))
    return members


def _places(
    one: Communicator, members: Mapping[int, Member], ranks: Mapping[str, int], world: int
) -> dict[int, int]:
    """Return the job's rank of each member that can be told."""
    places = {}
    for rank, member in members.items():
        if one.size == world:
            places[rank] = ranks.get(member.process or "", rank)
        elif member.process is not None and member.process in ranks:
            places[rank] = ranks[member.process]
    if one.size == world:
        for rank in range(one.size):
            places.setdefault(rank, rank)
    return places


def _ended(one: Communicator, members: Mapping[int, Member]) -> int:
    counts = [member.launched for member in members.values() if member.launched is not None]
    least = min(counts, default=0)
    silent = len(counts) < one.size
    return least - 1 if least and (silent or _differs(members, least)) else least


def _differs(members: Mapping[int, Member], number: int) -> bool:
    """Return whether members launched different things under one number."""
    forms = {
        (launch.name, launch.dtype, launch.elements)
        for member in members.values()
        for launch in member.launches
        if launch.number == number
    }
    return len(forms) > 1


def _operation(group: str, launch: Launch, ended: int) -> Operation:
    return Operation(
        group=group,
        sequence=launch.number,
        p2p_sequence=None,
        name=_snake(launch.name),
        peer=None,
        input_sizes=((launch.elements,),),
        output_sizes=(),
        dtypes=(launch.dtype,),
        state="completed" if launch.number <= ended else "scheduled",
        created_ns=None,
    )


def _snake(name: str) -> str:
    """Write ``AllReduce`` as ``all_reduce``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
