"""Where ranks that already run begin to count."""

from kansoku.capture.attach.align import Alignment


def test_nobody_begins_before_all_are_heard():
    alignment = Alignment()
    alignment.expected = {1, 2}
    assert not alignment.passes(1, "0", 10, 0)
    assert not alignment.passes(1, "0", 11, 1)
    assert not alignment.passes(2, "0", 12, 2)  # the point is 13: nobody has been there
    assert not alignment.passes(1, "0", 12, 3)
    assert alignment.passes(1, "0", 13, 4)
    assert alignment.passes(2, "0", 13, 5)


def test_other_groups_do_not_count():
    alignment = Alignment()
    alignment.size = 1
    assert not alignment.passes(1, "0", 1, 0)
    assert not alignment.passes(1, "7", 99, 1)
    assert alignment.passes(1, "0", 2, 2)


def test_patience_has_an_end():
    alignment = Alignment()
    alignment.expected = {1, 2}
    assert not alignment.passes(1, "0", 1, 0)
    assert not alignment.passes(1, "0", 2, 6_000_000_000)
    assert alignment.passes(1, "0", 3, 6_000_000_001)
