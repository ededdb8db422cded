"""Who is told when, and what."""

import pytest

from kansoku.errors import InputError
from kansoku.trace.recording import Plan, Round, Target, version_is_safe

S = 1_000_000_000


def targets(*pids):
    return {pid: Target(pid=pid, rank=pid - 1, file=f"/out/rank{pid - 1}.json") for pid in pids}


def ask(told, pid, at_s):
    return told.on_request(pid, now_ns=int(at_s * S), unix_ns=int((1000 + at_s) * S))


def test_a_stretch_of_time_starts_for_all_when_the_last_can():
    told = Round(plan=Plan(duration_ms=300), targets=targets(1, 2))
    assert ask(told, 1, 0.5) == ""
    second = ask(told, 2, 9.0)
    # 5 s until the other asks again, 2 s of margin, 2 s of warm-up.
    assert "PROFILE_START_TIME=1018000" in second.splitlines()
    assert "ACTIVITIES_DURATION_MSECS=300" in second.splitlines()
    assert "ACTIVITIES_LOG_FILE=/out/rank1.json" in second.splitlines()
    first = ask(told, 1, 10.5)
    assert "PROFILE_START_TIME=1018000" in first.splitlines()
    assert told.complete
    assert ask(told, 1, 15.5) == ""


def test_a_start_in_time_is_kept():
    told = Round(plan=Plan(duration_ms=300, start_ns=1100 * S), targets=targets(1))
    assert "PROFILE_START_TIME=1100000" in ask(told, 1, 1.0)


def test_steps_are_told_in_one_round_after_the_longest_pause():
    told = Round(plan=Plan(steps=3, round_up=50), targets=targets(1, 2, 3))
    # They ask at 0.0, 0.4 and 4.6 s of every five: 3 comes first after the pause.
    asked = [(1, 0.0), (2, 0.4), (3, 4.6), (1, 5.0), (2, 5.4), (3, 9.6), (1, 10.0), (2, 10.4)]
    answers = {(pid, at): ask(told, pid, at) for pid, at in asked}
    assert [key for key, text in answers.items() if text] == [(3, 9.6), (1, 10.0), (2, 10.4)]
    assert told.spread_ns == pytest.approx(0.8 * S)
    assert "PROFILE_START_ITERATION_ROUNDUP=50" in answers[1, 10.0]
    assert "ACTIVITIES_ITERATIONS=3" in answers[1, 10.0]


def test_strangers_get_nothing():
    told = Round(plan=Plan(duration_ms=1), targets=targets(1))
    assert ask(told, 99, 0.0) == ""
    assert told.silent() == [1]


def test_a_dead_process_is_not_waited_for():
    told = Round(plan=Plan(duration_ms=1), targets=targets(1, 2))
    assert ask(told, 1, 0.0) == ""
    told.give_up(2)
    assert ask(told, 1, 5.0) != ""


@pytest.mark.parametrize(
    "wrong", [{}, {"steps": 1, "duration_ms": 1}, {"steps": 0}, {"duration_ms": -5}]
)
def test_plans_that_make_no_sense(wrong):
    with pytest.raises(InputError):
        Plan(**wrong)


def test_a_file_name_cannot_add_settings():
    with pytest.raises(InputError, match="line break"):
        Plan(steps=1).config("/out/x\nACTIVITIES_LOG_FILE=/etc/passwd")


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ("2.13.0+cpu", True),
        ("2.10.0", True),
        ("2.9.1", False),
        ("1.13.1", False),
        ("3.0", True),
        (None, None),
        ("weird", None),
    ],
)
def test_versions_with_the_race_are_known(version, safe):
    assert version_is_safe(version) is safe


def test_who_asks_when_the_start_is_too_near_is_not_told_in_vain():
    told = Round(plan=Plan(duration_ms=300), targets=targets(1, 2))
    assert ask(told, 1, 0.0) == ""
    # Both have asked: the start is at 1 + 5 + 2 + 2, and warming up begins at 8.
    assert "PROFILE_START_TIME=1010000" in ask(told, 2, 1.0)
    assert ask(told, 1, 9.0) == ""
    assert (told.late, set(told.told_ns)) == ({1}, {2})
