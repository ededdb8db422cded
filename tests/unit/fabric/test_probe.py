"""The probe protocol, stamp by stamp."""

from hypothesis import given
from hypothesis import strategies as st

from kansoku.fabric.probe import (
    SIZE,
    TRANSITIONS,
    Kind,
    Late,
    Prober,
    Responder,
    Result,
    StampSource,
    State,
    decode,
    encode,
)

MS = 1_000_000


def packet(kind, sequence, *, qpn=7, delay=0):
    return decode(
        encode(kind, source_port=50000, target_qpn=qpn, source_qpn=9, sequence=sequence,
               delay_ns=delay, tuple_id=3)
    )  # fmt: skip


def prober():
    return Prober(timeout_ns=500 * MS, hold_ns=1000 * MS)


def test_fifty_bytes_round_trip():
    data = encode(Kind.ACK2, source_port=65535, target_qpn=1 << 23, source_qpn=5, sequence=1 << 40,
                  delay_ns=-5, tuple_id=77, hop=3)  # fmt: skip
    assert len(data) == SIZE == 50
    got = decode(data)
    assert (got.kind, got.source_port, got.target_qpn, got.source_qpn) == (
        Kind.ACK2, 65535, 1 << 23, 5,
    )  # fmt: skip
    assert (got.sequence, got.delay_ns, got.tuple_id, got.hop) == (1 << 40, -5, 77, 3)


@given(st.binary(max_size=60))
def test_foreign_bytes_are_none(data):
    assert decode(data) is None


def test_three_measures_by_hand():
    """① 1000, ② 1010, ③ 5000, ④ 5030, ⑤ 1100, ⑥ 1150 (③④ on another clock)."""
    p = prober()
    sequence = p.start(3, 1000, 7)
    p.stamped(sequence, 1010, StampSource.KERNEL)
    assert p.receive(packet(Kind.ACK1, sequence), 1100, 1150) is None
    result = p.receive(packet(Kind.ACK2, sequence, delay=30), 1120, 1160)
    assert isinstance(result, Result)
    assert not result.lost
    assert result.rtt_ns == (1100 - 1010) - 30
    assert result.responder_delay_ns == 30
    assert result.prober_delay_ns == (1150 - 1000) - (1100 - 1010)
    assert result.stamp_source == "kernel"
    assert len(p) == 0


def test_without_stamp_two_the_result_says_application():
    p = prober()
    sequence = p.start(3, 1000, 7)
    p.receive(packet(Kind.ACK1, sequence), 1100, 1150)
    result = p.receive(packet(Kind.ACK2, sequence, delay=30), None, 1160)
    assert result.rtt_ns == (1100 - 1000) - 30
    assert result.prober_delay_ns is None
    assert result.stamp_source == "application"


def test_acks_may_overtake_each_other():
    p = prober()
    sequence = p.start(3, 1000, 7)
    assert p.receive(packet(Kind.ACK2, sequence, delay=30), None, 1160) is None
    assert p.receive(packet(Kind.ACK1, sequence), 1100, 1150).rtt_ns == 70


def test_losing_either_ack_is_a_timeout():
    for got in (None, Kind.ACK1, Kind.ACK2):
        p = prober()
        sequence = p.start(3, 1000, 7)
        if got:
            p.receive(packet(got, sequence), 1100, 1150)
        assert p.expire(1000 + 500 * MS) == []
        (result,) = p.expire(1001 + 500 * MS)
        assert result.lost
        assert result.rtt_ns is None
        assert p.expire(1001 + 500 * MS) == []


def test_a_late_answer_tells_how_long_the_host_took():
    p = prober()
    sequence = p.start(3, 0, 7)
    p.expire(501 * MS)
    late = p.receive(packet(Kind.ACK2, sequence, delay=600 * MS), 700 * MS, 700 * MS)
    assert late == Late(3, 0, 600 * MS)
    assert p.receive(packet(Kind.ACK2, sequence), 701 * MS, 701 * MS) is None


def test_held_answers_are_given_up():
    p = prober()
    sequence = p.start(3, 0, 7)
    p.expire(501 * MS)
    p.expire(1501 * MS)
    assert p.receive(packet(Kind.ACK2, sequence), 1502 * MS, 1502 * MS) is None
    assert p.strangers == 1


def test_the_nics_clock_decides_what_was_in_time():
    """The answer lay in the socket while the prober was off the CPU: no loss."""
    p = prober()
    sequence = p.start(3, 0, 7)
    p.receive(packet(Kind.ACK1, sequence), 2 * MS, 900 * MS)
    result = p.receive(packet(Kind.ACK2, sequence, delay=5), 2 * MS, 900 * MS)
    assert not result.lost


def test_an_answer_stamped_late_is_lost_although_nobody_timed_it_out():
    p = prober()
    sequence = p.start(3, 0, 7)
    assert p.receive(packet(Kind.ACK1, sequence), 600 * MS, 600 * MS).lost


def test_duplicates_and_strangers_are_counted():
    p = prober()
    sequence = p.start(3, 0, 7)
    p.receive(packet(Kind.ACK1, sequence), 1, 1)
    p.receive(packet(Kind.ACK1, sequence), 1, 1)
    p.receive(packet(Kind.ACK1, 999), 1, 1)
    assert (p.duplicates, p.strangers) == (1, 1)


def test_every_waiting_state_can_time_out_and_the_ends_go_nowhere():
    waiting = {State.SENT, State.HAVE_ACK1, State.HAVE_ACK2}
    assert {state for state, event in TRANSITIONS if event == "timeout"} == waiting
    assert {state for state, _ in TRANSITIONS} == waiting
    assert set(TRANSITIONS.values()) == set(State) - {State.SENT}


def test_responder_answers_its_own_queue_pair_only():
    r = Responder(7)
    assert r.receive(packet(Kind.PROBE, 1, qpn=6), 100, 0) is None
    assert r.stale == 1
    ack1, token = r.receive(packet(Kind.PROBE, 1, qpn=7), 100, 105)
    assert decode(ack1).kind is Kind.ACK1
    assert decode(ack1).target_qpn == 9
    ack2, probe = r.stamped(token, 130, 150)
    assert decode(ack2).delay_ns == 30
    assert probe.source_port == 50000
    assert r.stamped(token, 130, 150) is None


HARD, KERNEL = StampSource.HARDWARE, StampSource.KERNEL


def test_differences_never_cross_clocks():
    """A NIC's clock that is years away from the host's: only its own differences count."""
    far = 10**18
    p = prober()
    sequence = p.start(3, 1000, 7)
    p.stamped(sequence, far + 10, HARD)
    p.receive(packet(Kind.ACK1, sequence), far + 100, 1150, HARD)
    result = p.receive(packet(Kind.ACK2, sequence, delay=30), far + 120, 1160, HARD)
    assert (result.rtt_ns, result.prober_delay_ns, result.stamp_source) == (60, 60, "hardware")
    # ② by the NIC but ⑤ by the kernel: what is left is the application's clock, and says so.
    sequence = p.start(3, 1000, 7)
    p.stamped(sequence, far + 10, HARD)
    p.receive(packet(Kind.ACK1, sequence), 1100, 1150, KERNEL)
    result = p.receive(packet(Kind.ACK2, sequence, delay=30), 1120, 1160, KERNEL)
    assert (result.rtt_ns, result.stamp_source) == (70, "application")


def test_responder_delay_is_of_one_clock_or_the_applications():
    for t4, source, expected in ((530, HARD, 30), (9, KERNEL, 50), (None, KERNEL, 50)):
        r = Responder(7)
        _, token = r.receive(packet(Kind.PROBE, 1, qpn=7), 500, 1000, HARD)
        ack2, _ = r.stamped(token, t4, 1050, source)
        assert decode(ack2).delay_ns == expected


def test_a_clock_set_back_keeps_no_probe_for_ever():
    p = prober()
    for _ in range(100):
        p.start(3, 3600_000 * MS, 7)
    sequence = p.start(3, 100 * MS, 7)  # after the clock was set back by an hour
    assert p.expire(200 * MS) == []
    assert len(p) == 1
    assert p.receive(packet(Kind.ACK1, sequence), 150 * MS, 150 * MS) is None
    assert [result.lost for result in p.expire(700 * MS)] == [True]
    assert len(p) == 0


def test_late_ones_of_a_clock_set_back_go_too():
    p = prober()
    p.start(3, 3600_000 * MS, 7)
    assert len(p.expire(3600_600 * MS)) == 1
    assert len(p._late) == 1
    p.expire(200 * MS)
    assert len(p._late) == 0


def test_a_delay_beyond_sense_is_no_answer():
    p = prober()
    sequence = p.start(3, 1000, 7)
    p.receive(packet(Kind.ACK1, sequence), 1100, 1150)
    for delay in (-(1 << 63), (1 << 63) - 1):
        assert p.receive(packet(Kind.ACK2, sequence, delay=delay), 1120, 1160) is None
    result = p.receive(packet(Kind.ACK2, sequence, delay=30), 1120, 1160)
    assert result.responder_delay_ns == 30
    assert p.strangers == 2
