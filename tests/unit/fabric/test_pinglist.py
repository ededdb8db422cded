"""Pinglists: coverage, rates, rotation, rails."""

import itertools

import numpy as np
import pytest

from kansoku.fabric.ecmp import smallest_k
from kansoku.fabric.pinglist import INTER_TOR, TOR_MESH, _permuted_ports, make_plan, tuple_keys
from kansoku.fabric.settings import Settings
from kansoku.fabric.topology import Topology


def fabric(tors=4, per_tor=5, spines=4, rails=1):
    count = tors * per_tor
    return Topology(
        rnics=tuple(f"h{n}/nic0" for n in range(count)),
        hosts=tuple(f"h{n}" for n in range(count)),
        tors=tuple(f"t{n}" for n in range(tors)),
        spines=tuple(f"s{n}" for n in range(spines)),
        rnic_host=np.arange(count, dtype=np.int32),
        rnic_tor=(np.arange(count) // per_tor).astype(np.int32),
        parallel_paths=spines,
        rail_optimised=rails > 1,
        tor_rail=(np.arange(tors) % rails).astype(np.int32),
    )


@pytest.fixture(scope="module")
def plan():
    return make_plan(fabric(), Settings())


def rates(plan, mask):
    return np.bincount(plan.source[mask], weights=1 / plan.interval_s[mask], minlength=20)


def test_every_pair_under_a_tor_probes_each_other(plan):
    mesh = plan.kind == TOR_MESH
    assert mesh.sum() == 4 * 5 * 4
    tor = np.arange(20) // 5
    assert (tor[plan.source[mesh]] == tor[plan.target[mesh]]).all()
    assert not (plan.source == plan.target).any()


def test_tor_mesh_is_ten_probes_a_second_per_rnic(plan):
    assert rates(plan, plan.kind == TOR_MESH) == pytest.approx(np.full(20, 10.0))


def test_k_tuples_with_distinct_ports_per_tor_pair(plan):
    assert plan.k == smallest_k(4) == 21
    inter = plan.kind == INTER_TOR
    pair = (plan.source[inter] // 5) * 4 + plan.target[inter] // 5
    for one in np.unique(pair):
        ports = plan.port[inter][pair == one]
        assert len(ports) == 21
        assert len(set(ports.tolist())) == 21
    assert len(np.unique(pair)) == 12
    assert plan.port.min() >= 49152
    assert plan.port.max() <= 65535


def test_every_up_link_expects_more_than_ten_probes_a_second(plan):
    """A ToR's own probes go over its 4 up-links, and as many ACKs to the others' probes."""
    inter = plan.kind == INTER_TOR
    per_tor = np.bincount(plan.source[inter] // 5, weights=1 / plan.interval_s[inter])
    assert (2 * per_tor / 4 > 10).all()


def test_rows_are_found_by_source_and_by_target(plan):
    for rnic in (0, 7, 19):
        assert (plan.source[plan.offsets[rnic] : plan.offsets[rnic + 1]] == rnic).all()
        rows = plan.by_target[plan.target_offsets[rnic] : plan.target_offsets[rnic + 1]]
        assert (plan.target[rows] == rnic).all()
        assert len(rows) == (plan.target == rnic).sum()


def inter_keys(plan):
    inter = plan.kind == INTER_TOR
    return set(tuple_keys(plan.source[inter], plan.target[inter], plan.port[inter], 20).tolist())


def test_a_fifth_of_the_tuples_is_renewed_hourly():
    shape = fabric(tors=6, per_tor=4, spines=16)
    plans = [inter_keys(make_plan(shape, Settings(), time_s=hour * 3600)) for hour in range(7)]
    for before, after in itertools.pairwise(plans):
        assert len(after - before) / len(after) == pytest.approx(0.2, abs=0.02)
    # After five hours nothing is left of the first hour.
    assert len(plans[0] & plans[5]) / len(plans[0]) < 0.02
    assert inter_keys(make_plan(shape, Settings(), time_s=1800)) == plans[0]


def test_feistel_ports_are_a_permutation():
    ports = _permuted_ports(np.arange(16384), np.full(16384, 5), 1)
    assert len(set(ports.tolist())) == 16384


def test_rates_are_bounded():
    plan = make_plan(fabric(tors=2, per_tor=2, spines=8), Settings(probes_per_s=20.0))
    per_rnic = np.bincount(plan.source, weights=1 / plan.interval_s)
    assert per_rnic.max() <= 20.0001


def test_thinned_peers_keep_the_rail_and_the_same_in_degree():
    shape = fabric(tors=32, per_tor=2, spines=8, rails=8)
    plan = make_plan(shape, Settings(tuples_per_rnic=51 * 3))
    assert plan.peers == 6
    inter = plan.kind == INTER_TOR
    a, b = plan.source[inter] // 2, plan.target[inter] // 2
    same_rail = (a % 8) == (b % 8)
    # All three other pods of the rail are among the six peers.
    assert len(set(zip(a[same_rail].tolist(), b[same_rail].tolist(), strict=True))) == 32 * 3
    pairs = {(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)}
    assert set(np.bincount([y for _, y in pairs]).tolist()) == {6}


def test_one_tor_only_has_no_inter_tor_tuples():
    plan = make_plan(fabric(tors=1, per_tor=3, spines=1), Settings())
    assert set(plan.kind.tolist()) == {TOR_MESH}


def test_one_rnic_a_tor_has_no_mesh():
    plan = make_plan(fabric(tors=3, per_tor=1, spines=2), Settings())
    assert set(plan.kind.tolist()) == {INTER_TOR}
