"""Peeling and voting on fabrics small enough to check by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.fabric.localise import LINK, RNIC, SWITCH, localise
from kansoku.fabric.settings import Settings

POLICY = Settings()


def mesh(size, dead, probes=100):
    """All pairs under one ToR (component ``size``); every probe touching ``dead`` is lost."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    components = np.array([[a, b, size] for a, b in pairs], dtype=np.int32).T
    lost = [probes if {a, b} & set(dead) else 0 for a, b in pairs]
    kinds = np.array([RNIC] * size + [SWITCH], dtype=np.int8)
    return components, np.full(len(pairs), probes), np.array(lost), kinds


@pytest.mark.parametrize("size", [3, 4, 8])
def test_one_dead_rnic_condemns_no_peer(size):
    """Each peer loses 1/(size-1) of its probes, up to half: far above 10 %, yet innocent."""
    blames = localise(*mesh(size, {1}), POLICY)
    assert [b.component for b in blames] == [1]
    assert blames[0].loss_ratio == 1.0
    assert blames[0].votes == 2 * (size - 1) * 100


def test_two_dead_rnics_under_one_tor():
    blames = localise(*mesh(8, {1, 6}), POLICY)
    assert sorted(b.component for b in blames) == [1, 6]


def test_all_dead_is_the_tor():
    blames = localise(*mesh(8, range(8)), POLICY)
    assert [b.component for b in blames] == [8]


def test_a_pair_alone_is_a_tie_and_everyone_leads():
    blames = localise(*mesh(2, {0}), POLICY)
    assert sorted(b.component for b in blames) == [0, 1, 2]
    assert len({b.group for b in blames}) == 1


def test_an_rnic_below_ten_percent_is_peeled_but_not_blamed():
    components, probes, lost, kinds = mesh(8, {1})
    assert localise(components, probes, lost // 20, kinds, POLICY) == []


def test_background_loss_blames_nobody():
    components, probes, _, kinds = mesh(8, set())
    rng = np.random.default_rng(1)
    assert localise(components, probes, rng.binomial(probes, 1e-4), kinds, POLICY) == []


def clos(leaves, spines, up_loss):
    """Rows leaf a → spine s → leaf b, one RNIC a leaf; ``up_loss`` maps (a, s) to a ratio."""
    up = {(a, s): leaves + spines + a * spines + s for a in range(leaves) for s in range(spines)}
    rows, lost = [], []
    for a in range(leaves):
        for b in range(leaves):
            for s in range(spines if a != b else 0):
                rows.append([leaves + s, up[a, s], a, b])
                lost.append(round(100 * up_loss.get((a, s), 0)))
    kinds = np.array([SWITCH] * (leaves + spines) + [LINK] * len(up), dtype=np.int8)
    return np.array(rows, dtype=np.int32).T, np.full(len(rows), 100), np.array(lost), kinds, up


@pytest.mark.parametrize("loss", [1.0, 0.1, 0.03])
def test_a_link_is_told_from_its_switches(loss):
    *arguments, up = clos(4, 3, {(2, 1): loss})
    assert [b.component for b in localise(*arguments, POLICY)] == [up[2, 1]]


def test_a_spine_is_told_from_its_links():
    *arguments, _ = clos(4, 3, {(a, 1): 0.5 for a in range(4)})
    assert [b.component for b in localise(*arguments, POLICY)] == [4 + 1]


def test_two_links_at_once():
    *arguments, up = clos(4, 3, {(2, 1): 1.0, (0, 2): 0.2})
    assert [b.component for b in localise(*arguments, POLICY)] == [up[2, 1], up[0, 2]]


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(random):
    components, probes, lost, kinds, _ = clos(4, 3, {(2, 1): 1.0, (0, 2): 0.2})
    order = list(range(len(probes)))
    random.shuffle(order)
    straight = localise(components, probes, lost, kinds, POLICY)
    assert localise(components[:, order], probes[order], lost[order], kinds, POLICY) == straight


def test_slow_probes_are_voted_on_by_their_own_policy():
    components, probes, lost, kinds, up = clos(4, 3, {(2, 1): 0.4})
    blames = localise(components, probes, lost, kinds, POLICY, slow=True)
    assert [b.component for b in blames] == [up[2, 1]]
    assert localise(components, probes, lost // 20, kinds, POLICY, slow=True) == []
