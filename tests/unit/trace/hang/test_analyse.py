"""Hangs by hand: a late rank, mismatches, cycles, sends without receives, silence, devices."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.trace.hang.analyse import analyse_hang
from kansoku.trace.hang.record import Group, Operation, RankState, Status


def op(group, sequence, name="all_reduce", *, sizes=((8,),), dtypes=("Float",), state="scheduled"):
    return Operation(
        group=group, sequence=sequence, p2p_sequence=None, name=name, peer=None,
        input_sizes=sizes, output_sizes=sizes, dtypes=dtypes, state=state, created_ns=None,
    )  # fmt: skip


def p2p(group, sequence, name, peer):
    return Operation(
        group=group, sequence=None, p2p_sequence=sequence, name=name, peer=peer, input_sizes=(),
        output_sizes=(), dtypes=(), state="scheduled", created_ns=None,
    )  # fmt: skip


def rank(number, groups, status, operations=()):
    return RankState(
        rank=number,
        file=f"rank_{number}",
        groups={
            name: Group(name=name, description=None, ranks=tuple(ranks))
            for name, ranks in groups.items()
        },
        status={name: Status(enqueued=e, completed=c) for name, (e, c) in status.items()},
        operations=tuple(operations),
    )


WORLD = {"world": range(4)}


def test_one_rank_that_did_not_come():
    states = [rank(r, WORLD, {"world": (9, 8) if r != 2 else (8, 8)}) for r in range(4)]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("missing_ranks", (2,))
    assert verdict.reason == "rank 2 has not entered what the others wait in"
    assert verdict.evidence == (
        "rank 2 is waited for by ranks 0-1, 3 in group world, collective 9",
    )
    assert verdict.groups[0].missing == (2,)
    assert verdict.groups[0].sequence == 9


def test_both_of_two_late_ranks_are_named():
    states = [rank(r, WORLD, {"world": (9, 8) if r < 2 else (8, 8)}) for r in range(4)]
    verdict = analyse_hang(states)
    assert verdict.culprits == (2, 3)
    assert verdict.reason == "ranks 2-3 have not entered what the others wait in"


def test_a_victim_in_another_group_is_not_blamed():
    """Rank 1 is late for the world because it waits for rank 3 in its pair."""
    groups = {"world": range(4), "pair": (1, 3)}
    states = [
        rank(0, WORLD, {"world": (9, 8)}),
        rank(1, groups, {"world": (8, 8), "pair": (5, 4)}),
        rank(2, WORLD, {"world": (9, 8)}),
        rank(3, groups, {"world": (8, 8), "pair": (4, 4)}),
    ]
    assert analyse_hang(states).culprits == (3,)


def test_two_groups_in_different_order_are_a_cycle():
    groups = {"a": (0, 1), "b": (0, 1)}
    states = [
        rank(0, groups, {"a": (3, 2), "b": (2, 2)}),
        rank(1, groups, {"a": (2, 2), "b": (3, 2)}),
    ]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("cycle", (0, 1))


def test_waiters_behind_a_cycle_are_not_part_of_it():
    groups = {"a": (0, 1), "b": (0, 1), "world": range(3)}
    states = [
        rank(0, groups, {"a": (3, 2), "b": (2, 2), "world": (1, 1)}),
        rank(1, groups, {"a": (2, 2), "b": (3, 2), "world": (1, 1)}),
        rank(2, {"world": range(3)}, {"world": (2, 1)}),
    ]
    assert analyse_hang(states).culprits == (0, 1)


def test_different_operations_under_one_number():
    states = [
        rank(r, WORLD, {"world": (9, 8)}, [op("world", 9, "broadcast" if r == 1 else "all_reduce")])
        for r in range(4)
    ]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("mismatch", (1,))
    assert "broadcast" in verdict.reason


def test_different_sizes_of_an_all_reduce_but_not_of_an_all_to_all():
    def world(name):
        return [
            rank(r, WORLD, {"world": (9, 8)}, [op("world", 9, name, sizes=((8 + (r == 3),),))])
            for r in range(4)
        ]

    assert analyse_hang(world("all_reduce")).culprits == (3,)
    assert analyse_hang(world("all_to_all")).verdict == "device_or_fabric"


def test_a_reshaped_tensor_of_equal_volume_is_no_mismatch():
    states = [
        rank(r, WORLD, {"world": (9, 8)}, [op("world", 9, sizes=(((2, 4) if r else (8,)),))])
        for r in range(4)
    ]
    assert analyse_hang(states).verdict == "device_or_fabric"


def test_a_tie_names_both_sides():
    states = [
        rank(r, {"g": (0, 1)}, {"g": (1, 0)}, [op("g", 1, dtypes=("Half" if r else "Float",))])
        for r in range(2)
    ]
    assert analyse_hang(states).culprits == (0, 1)


def test_a_send_without_its_receive():
    groups = {"pp": (0, 4)}
    states = [
        rank(0, groups, {"pp": (7, 6)}, [p2p("pp", 7, "send", 1)]),
        rank(4, groups, {"pp": (6, 6)}),
    ]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("missing_ranks", (4,))


def test_both_halves_issued_point_at_device_or_fabric():
    groups = {"pp": (0, 4)}
    states = [
        rank(0, groups, {"pp": (7, 6)}, [p2p("pp", 7, "send", 1)]),
        rank(4, groups, {"pp": (7, 6)}, [p2p("pp", 7, "recv", 0)]),
    ]
    assert analyse_hang(states).verdict == "device_or_fabric"


def test_a_device_that_did_not_begin_is_named():
    states = [
        rank(
            r,
            WORLD,
            {"world": (9, 8)},
            [op("world", 9, state="scheduled" if r == 1 else "started")],
        )
        for r in range(4)
    ]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("device_or_fabric", (1,))


def test_a_missing_dump_is_evidence():
    states = [rank(r, WORLD, {"world": (9, 8)}) for r in (0, 1, 3)]
    verdict = analyse_hang(states)
    assert (verdict.verdict, verdict.culprits) == ("missing_ranks", (2,))


def test_one_dump_of_many_blames_nobody():
    verdict = analyse_hang([rank(0, {"world": range(16)}, {"world": (9, 8)})])
    assert verdict.culprits == ()


def test_everything_ended():
    assert analyse_hang([rank(r, WORLD, {"world": (9, 9)}) for r in range(4)]).verdict == "none"


def test_nothing_to_read():
    assert analyse_hang([]).verdict == "unknown"


@settings(max_examples=60, deadline=None)
@given(
    late=st.sets(st.integers(0, 7), min_size=1, max_size=3),
    order=st.permutations(range(8)),
    behind=st.integers(1, 5),
)
def test_late_ranks_are_found_whatever_the_order_of_files(late, order, behind):
    states = [
        rank(
            r, {"world": range(8)}, {"world": (20 - behind, 20 - behind) if r in late else (20, 19)}
        )
        for r in order
    ]
    if behind:
        assert set(analyse_hang(states).culprits) == late


def test_a_long_chain_of_waits_needs_no_recursion():
    """Ranks 0 … 2999 each wait for the next in a pair; the last is at fault."""
    states = []
    for r in range(3000):
        groups, status = {}, {}
        for a, b in itertools.pairwise((r - 1, r, r + 1)):
            if a >= 0 and b < 3000:
                name = f"{a}-{b}"
                groups[name] = (a, b)
                status[name] = (1, 0) if a == r else (0, 0)
        states.append(rank(r, groups, status))
    assert analyse_hang(states).culprits == (2999,)
