"""The wire form of columns, decoded by hand; reduction that keeps minimum and maximum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.labs.web_columns import decode

from kansoku.app.web_columns import columns_bytes, heatmap_columns, reduced, timeline_columns
from kansoku.app.web_page import Columns
from kansoku.errors import InputError
from kansoku.view import Heatmap, Span, Timeline


def test_arrays_stand_little_endian_behind_a_json_header():
    sent = Columns(
        kind="x",
        header={"title": "é"},
        arrays={
            "a": np.array([1, 2, 3], dtype=">i4"),
            "b": np.array([[0.5], [np.nan]], np.float32),
        },
    )
    header, arrays = decode(columns_bytes(sent))
    assert (header["version"], header["kind"], header["title"]) == (1, "x", "é")
    assert arrays["a"].tolist() == [1, 2, 3]
    assert arrays["b"].shape == (2, 1)
    assert np.isnan(arrays["b"][1, 0])


def test_small_matrices_travel_as_they_are():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    low, high, down, across = reduced(values)
    assert low is values
    assert high is values
    assert (down, across) == (1, 1)


def test_a_single_peak_and_a_single_hole_survive_reduction():
    values = np.full((900, 3000), 5.0, np.float32)
    values[617, 1999] = 99.0
    values[3, 2] = -7.0
    values[500:520, :40] = np.nan
    low, high, down, across = reduced(values)
    assert low.size <= 2_000_000
    assert high[617 // down, 1999 // across] == 99.0
    assert low[617 // down, 1999 // across] == 5.0
    assert low[3 // down, 2 // across] == -7.0
    assert np.isnan(high[510 // down, 20 // across])


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_reduction_keeps_the_extremes_of_every_block(rows, columns, most, seed):
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    low, high, down, across = reduced(values, most=most)
    for r in range(low.shape[0]):
        for c in range(low.shape[1]):
            block = values[r * down : (r + 1) * down, c * across : (c + 1) * across]
            assert low[r, c] == block.min()
            assert high[r, c] == block.max()
    assert low.size <= max(most, low.shape[1])


def test_a_heat_map_says_how_much_a_cell_holds():
    block = Heatmap(title="t", row_labels=["a", "b"], column_labels=["x", "y", "z"],
                    values=[[1.0, None, 3.0], [4.0, 5.0, 6.0]], unit="W")  # fmt: skip
    header, arrays = decode(columns_bytes(heatmap_columns(block)))
    assert (header["rows"], header["columns"], header["low"], header["high"]) == (2, 3, 1.0, 6.0)
    assert (header["rows_per_cell"], header["columns_per_cell"], header["known"]) == (1, 1, 5)
    assert np.isnan(arrays["high"][0, 1])
    assert "low" not in arrays


def test_spans_come_sorted_by_lane_depth_and_start():
    spans = [
        Span(lane=1, start_ns=50, duration_ns=5, name="b", kind="forward"),
        Span(lane=0, start_ns=90, duration_ns=1, name="a", kind="step"),
        Span(lane=0, start_ns=40, duration_ns=9, name="c", kind="forward", depth=1, mark="late"),
        Span(lane=0, start_ns=40, duration_ns=60, name="a", kind="step"),
    ]
    header, arrays = decode(
        columns_bytes(timeline_columns(Timeline(title="t", lanes=["r0", "r1"], spans=spans)))
    )
    assert arrays["lane"].tolist() == [0, 0, 0, 1]
    assert arrays["start_ns"].tolist() == [0.0, 50.0, 0.0, 10.0]
    assert [header["names"][n] for n in arrays["name"]] == ["a", "a", "c", "b"]
    assert [header["marks"][n] for n in arrays["mark"]] == ["", "", "late", ""]


def test_columns_of_a_timeline_must_have_one_length():
    from kansoku.app.web_columns import span_columns

    ints, longs = np.zeros(2, np.int32), np.zeros(2, np.int64)
    with pytest.raises(InputError, match="differ in length"):
        span_columns(title="t", lanes=["a"], lane=ints, depth=ints, start_ns=longs,
                     duration_ns=np.zeros(3, np.int64), name=ints, kind=ints, mark=ints,
                     names=["n"], kinds=["k"])  # fmt: skip


def test_many_cells_travel_in_two_bytes_each_to_a_30th_of_a_colour():
    rng = np.random.default_rng(7)
    values = rng.normal(400, 90, (400, 300)).astype(np.float32)
    values[3, 4] = np.nan
    block = Heatmap(title="t", row_labels=[""] * 400, column_labels=[""] * 300, values=values,
                    unit="W", low=0.0, high=700.0)  # fmt: skip
    header, arrays = decode(columns_bytes(heatmap_columns(block)))
    code = header["codes"]["high"]
    assert arrays["high"].dtype == np.uint16
    back = np.where(arrays["high"] == 65535, np.nan, code["from"] + code["step"] * arrays["high"])
    assert np.isnan(back[3, 4])
    assert np.nanmax(np.abs(back - values)) < 700 / 255 / 30


def test_values_far_beyond_the_colours_keep_all_their_bits():
    values = np.zeros((400, 300), np.float32)
    values[0, 0] = 1e9
    block = Heatmap(title="t", row_labels=[""] * 400, column_labels=[""] * 300, values=values,
                    unit="/s", low=0.0, high=10.0)  # fmt: skip
    header, arrays = decode(columns_bytes(heatmap_columns(block)))
    assert header["codes"] == {}
    assert arrays["high"][0, 0] == 1e9
