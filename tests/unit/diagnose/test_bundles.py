"""Bundles with a known cause, whole: the right domain first, the forbidden one never."""

import pytest
from tests.labs import bundle_fresh, bundles
from tests.labs.bundle_scores import score


@pytest.mark.parametrize("writer", [bundles, bundle_fresh])
def test_nearly_all_domains_are_right_and_no_forbidden_one_stands_first(tmp_path, writer):
    """Every second bundle of one seed, to keep the suite short; the benchmark scores whole ones."""
    scores = [score(case) for case in writer.write_bundles(tmp_path, 5)[::2]]
    assert [(s.name, s.said) for s in scores if s.forbidden_first] == []
    wrong = [(s.name, s.said) for s in scores if not s.domain]
    assert len(wrong) <= 0.05 * len(scores), wrong
