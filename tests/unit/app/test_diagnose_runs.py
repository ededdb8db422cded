"""What diagnose says of a run's collectives that do not end."""

import pytest

from kansoku.app.diagnose._runs import _of_blocked
from kansoku.trace.blackbox import BlockedCollective


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ((0,), "rank 1 is between phases while 1 rank waits for it in all_reduce 7 of group g"),
        ((0, 2), "rank 1 is between phases while 2 ranks wait for it in all_reduce 7 of group g"),
    ],
)
def test_one_rank_waits_and_many_wait(waiting, said):
    blocked = BlockedCollective(
        group="g", sequence=7, op="all_reduce", waiting=waiting, missing=(1,), entered_ns=1,
        missing_states={},
    )  # fmt: skip
    (observation,) = _of_blocked(blocked, {}, {1: "n"})
    assert observation.text == said
