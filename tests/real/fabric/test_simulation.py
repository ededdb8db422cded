"""A Clos of 10,000 RNICs with random faults of every kind, several at once.

The seeds are fixed here; the benchmark draws new ones each time and prints them.
"""

import numpy as np
import pytest
from tests.labs import fabric_sim as sim
from tests.labs import fabric_trials as trials

from kansoku.fabric.analyser import analyse

TRIALS = 7


@pytest.fixture(scope="module")
def fabric():
    made = trials.make_fabric()
    assert len(made.topology.rnics) == 10_000
    return made


@pytest.mark.real
def test_random_faults_in_a_clos_of_10000(fabric, capsys):
    score = trials.Score()
    for seed in range(1000, 1000 + TRIALS):
        trials.run_trial(fabric, seed, score)
    with capsys.disabled():
        print(f"\n{TRIALS} trials, 10,000 RNICs, {len(fabric.plan)} tuples")
        for kind in sim.KINDS:
            print(f"  {kind:6} {score.line(kind)}")
    for kind in sim.KINDS:
        assert score.hits[kind] + score.missed[kind] >= 10
        assert score.precision(kind) >= 0.95, score.wrong
        assert score.recall(kind) >= 0.9, score.wrong


@pytest.mark.real
def test_a_healthy_clos_is_cleared(fabric):
    rng = np.random.default_rng(7)
    faults = sim.draw_faults(fabric.clos, rng, count=0)
    for number in range(2):
        window = trials.window_of(fabric, faults, rng, number)
        analysis = analyse(window, fabric.topology, fabric.book, trials.SETTINGS)
        assert analysis.lost > 0
        assert analysis.verdict == "clear"
        assert analysis.reason.startswith("network cleared")
