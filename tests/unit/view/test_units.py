"""Byte counts, by hand."""

import pytest

from kansoku.view.units import in_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, None), (0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")],
)
def test_bytes_in_the_largest_unit_they_fill(count, text):
    assert in_bytes(count) == text
