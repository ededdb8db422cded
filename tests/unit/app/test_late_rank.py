"""Whom the others wait for, by hand."""

import pytest

from kansoku.app._late_rank import late_rank


@pytest.mark.parametrize(
    ("wait_ratios", "late"),
    [
        ({}, None),
        ({3: 0.0}, None),
        ({0: 0.40, 1: 0.05}, 1),
        ({0: 0.40, 1: 0.30}, None),
        ({0: 0.30, 1: 0.02, 2: 0.34, 3: 0.28}, 1),
        # Two others: their median is 0.11, and 0.06 is more than half of it.
        ({0: 0.06, 1: 0.08, 2: 0.14}, None),
        ({0: 0.05, 1: 0.08, 2: 0.14}, 0),
        ({0: 0.00, 1: 0.04, 2: 0.04}, None),  # nobody waits noticeably
    ],
)
def test_the_rank_that_waits_much_less_than_its_peers(wait_ratios, late):
    assert late_rank(wait_ratios) == late
