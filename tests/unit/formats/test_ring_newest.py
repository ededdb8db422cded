"""The newest records of a lane, whatever the header says of them."""

import numpy as np
import pytest

from kansoku.formats._ring_newest import newest_stretches, since_all_lanes


def places(capacity, last, lane=1):
    """Return the ids of a lane's places after ``last`` records."""
    ids = np.zeros(capacity, np.uint64)
    for n in range(max(last - capacity, 0) + 1, last + 1):
        ids[(n - 1) % capacity] = lane << 56 | n
    return ids


@pytest.mark.parametrize("last", [0, 1, 99, 999, 1000, 1001, 1500, 5000])
@pytest.mark.parametrize("behind", [0, 1, 255, 256, 257, 700, 5000])
def test_the_newest_are_found_wherever_the_head_is(last, behind):
    ids = places(1000, last)
    taken = [
        int(ids[n]) & 0xFFFF
        for first, count in newest_stretches(ids, 120, max(last - behind, 0))
        for n in range(first, first + count)
    ]
    assert taken == list(range(max(last - 120, 0) + 1, last + 1))


def test_a_lane_of_no_room_has_none():
    assert newest_stretches(np.zeros(0, np.uint64), 10) == []


def test_what_another_lane_no_longer_tells_is_left_out():
    """Lane 0 reaches back to 0, lane 1 only to 50: before that its waits would be missing."""
    ids = np.concatenate([places(10, 3, lane=0), places(4, 9)])
    start = np.array([0, 40, 60, *[0] * 7, 90, 50, 70, 80])
    kept = since_all_lanes(ids, start, 4)
    assert start[kept].tolist() == [60, 90, 50, 70, 80]
    assert since_all_lanes(ids, start, 5).all()
