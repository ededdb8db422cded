"""Values kept a while: age, size, one computation for all who ask at once."""

import threading

from kansoku.app.web_memory import Memory


def test_a_young_value_is_not_made_again_and_an_old_one_builds_on_the_last():
    now = [0.0]
    memory = Memory(clock_s=lambda: now[0])
    made = []

    def make(old):
        made.append(old)
        return len(made), 10

    assert memory.get("k", 5.0, make) == 1
    now[0] = 4.9
    assert memory.get("k", 5.0, make) == 1
    now[0] = 5.1
    assert memory.get("k", 5.0, make) == 2
    assert made == [None, 1]


def test_the_least_used_goes_first_and_what_is_too_big_is_not_kept():
    memory = Memory(most_bytes=100)
    memory.get("a", 9, lambda _: ("a", 60))
    memory.get("b", 9, lambda _: ("b", 60))
    assert memory.size_bytes == 60
    assert memory.get("a", 9, lambda old: (old, 0)) is None
    memory.get("c", 9, lambda _: ("c", 101))
    assert memory.size_bytes == 0


def test_two_who_ask_at_once_wait_for_one_computation():
    memory, made, began = Memory(), [], threading.Event()
    release = threading.Event()

    def slow(_):
        made.append(1)
        began.set()
        release.wait(10)
        return "value", 1

    found = []
    first = threading.Thread(target=lambda: found.append(memory.get("k", 60, slow)))
    first.start()
    assert began.wait(10)
    second = threading.Thread(target=lambda: found.append(memory.get("k", 60, slow)))
    second.start()
    release.set()
    first.join(10)
    second.join(10)
    assert found == ["value", "value"]
    assert made == [1]
