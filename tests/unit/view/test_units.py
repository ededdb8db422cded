"""Byte counts and lengths of time, by hand."""

import pytest

from kansoku.view.units import in_bytes, in_time


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, None), (0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")],
)
def test_bytes_in_the_largest_unit_they_fill(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, None),
        (0, "0 s"),
        (0.00008, "80 µs"),
        (0.25, "250 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (90, "90 s"),
        (119, "119 s"),
        (780, "13.0 min"),
        (5.2 * 3600, "5.2 h"),
        (47 * 3600, "47.0 h"),
        (3.1 * 86_400, "3.1 d"),
        (-780, "-13.0 min"),
    ],
)
def test_times_in_the_largest_unit_they_fill_twice(seconds, text):
    assert in_time(seconds) == text
