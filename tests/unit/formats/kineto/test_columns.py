"""Columns that grow in place and stay narrow, and details that few rows have."""

import msgspec
import numpy as np
import pytest

from kansoku.formats.kineto._columns import NO_ID, _to_ns
from kansoku.formats.kineto._read import _Column
from kansoku.formats.kineto._trace import Detail


def test_a_column_widens_only_as_far_as_its_values_ask():
    column = _Column(np.int64)
    seen = []
    for values in ([1, -1], [40_000], [-(1 << 31) - 1], [7]):
        column.add(np.array(values, np.int64))
        seen.append(column._values.dtype)
    assert seen == [np.int16, np.int32, np.int64, np.int64]
    assert column.take().tolist() == [1, -1, 40_000, -(1 << 31) - 1, 7]


def test_a_column_grows_past_its_first_allocation():
    column = _Column(np.int64)
    for first in range(0, 200_000, 50_000):
        column.add(np.arange(first, first + 50_000))
    assert np.array_equal(column.take(), np.arange(200_000))


def test_a_column_of_one_byte_keeps_its_type():
    column = _Column(np.uint8)
    column.add(np.array([200], np.uint8))
    assert column.take().dtype == np.uint8


def test_details_of_rows_with_and_without():
    detail = Detail(np.array([2, 5]), np.array([1 << 40, 3]))
    assert detail.at(np.array([5, 0, 2, 9], np.int32), absent=-1).tolist() == [3, -1, 1 << 40, -1]
    empty = Detail(np.empty(0, np.int64), np.empty(0, np.int64))
    assert empty.at(np.array([0]), absent=-1).tolist() == [-1]


@pytest.mark.parametrize(
    ("texts", "ns"),
    [
        (["1704067200123456.789", "0.001"], [1704067200123456789, 1]),
        (["3999999999999999.999"], [3999999999999999999]),
        # Not all of one form: each is read by itself, to the same answers.
        (["1704067200123456.789", "12", "0.5", '"7.25"'], [1704067200123456789, 12000, 500, 7250]),
        (["1704067200123456.789", "-0.001"], [1704067200123456789, -1]),
        (["9999999999999999.999", "1.000"], [NO_ID, 1000]),
        (["null", "1.000"], [NO_ID, 1000]),
    ],
)
def test_stamps_kept_as_text_keep_every_digit(texts, ns):
    assert _to_ns([msgspec.Raw(text.encode()) for text in texts]).tolist() == ns
