"""OTLP's profiles signal: rows by hand, there and back, and indices that point nowhere."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.errors import InputError
from kansoku.telemetry.decode import decode
from kansoku.telemetry.profiles import encode_profiles, request_type

NOW = 1_800_000_000_000_000_000


def profile_request():
    """``main`` calls ``step``, into which ``loss`` is inlined; 7 samples there, 2 in ``main``."""
    request = request_type()()
    book = request.dictionary
    book.string_table.extend(["", "main", "step", "loss", "cpu", "samples", "kansoku.rank"])
    for table in (book.mapping_table, book.link_table):
        table.add()
    for name in (0, 1, 2, 3):
        book.function_table.add(name_strindex=name)
    book.location_table.add()
    book.location_table.add().lines.add(function_index=1)
    inlined = book.location_table.add()
    inlined.lines.add(function_index=3)
    inlined.lines.add(function_index=2)
    book.location_table.add(address=0xBEEF)
    book.stack_table.add()
    book.stack_table.add(location_indices=[2, 1])
    book.stack_table.add(location_indices=[1])
    book.stack_table.add(location_indices=[3, 1])
    book.stack_table.add(location_indices=[99])
    book.attribute_table.add()
    book.attribute_table.add(key_strindex=6).value.int_value = 3
    group = request.resource_profiles.add()
    attribute = group.resource.attributes.add(key="service.name")
    attribute.value.string_value = "trainer"
    profile = group.scope_profiles.add().profiles.add(time_unix_nano=NOW, duration_nano=5)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 4, 5
    profile.attribute_indices.append(1)
    profile.samples.add(stack_index=1, values=[7])
    profile.samples.add(stack_index=2, timestamps_unix_nano=[NOW, NOW + 1])
    profile.samples.add(stack_index=3, values=[1])
    profile.samples.add(stack_index=4, values=[1])  # a location that is not there
    profile.samples.add(stack_index=50, values=[1])  # a stack that is not there
    profile.samples.add(stack_index=0, values=[1])  # the empty stack
    return request


def test_stacks_by_hand():
    decoded = decode("profiles", profile_request().SerializeToString(), received_ns=NOW)
    rows = decoded.tables["profiles"].to_pylist()
    assert [(row["stack"], row["value"]) for row in rows] == [
        ("main;step;loss", 7), ("main", 2), ("main;0xbeef", 1),
    ]  # fmt: skip
    assert {(row["run"], row["rank"], row["start_ns"], row["end_ns"], row["unit"])
            for row in rows} == {("trainer", 3, NOW, NOW + 5, "samples")}  # fmt: skip
    assert decoded.items == 6
    assert decoded.skipped == {"no_stack": 3}


ROWS = pl.DataFrame(
    {
        "run": ["r1", "r1", "r2"], "rank": [0, 0, 1], "start_ns": [NOW, NOW, NOW + 9],
        "end_ns": [NOW + 5, NOW + 5, NOW + 10], "stack": ["a;b;c", "a;b", "a;b"],
        "value": [3, 4, 5], "unit": ["samples"] * 3,
    }
)  # fmt: skip


def test_rows_come_back_as_they_went():
    request = encode_profiles(ROWS, {"host.name": "c1"})
    decoded = decode("profiles", request.SerializeToString(), received_ns=NOW)
    assert decoded.tables["profiles"].to_pylist() == ROWS.to_dicts()
    assert len(request.dictionary.stack_table) == 3  # the empty one, and each text once


def test_a_stack_that_grows_beyond_measure_is_counted():
    request = profile_request()
    request.dictionary.string_table[1] = "x" * 1000
    request.dictionary.stack_table[1].location_indices[:] = [1] * 900
    decoded = decode("profiles", request.SerializeToString(), received_ns=NOW)
    assert decoded.skipped == {"no_stack": 4}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.integers(0, 400)
)
def test_damaged_profiles_are_rows_or_an_input_error(damages, cut):
    payload = bytearray(profile_request().SerializeToString())
    for at, byte in damages:
        payload[at % len(payload)] = byte
    for body in (bytes(payload), bytes(payload[:cut])):
        try:
            decode("profiles", body, received_ns=NOW)
        except InputError as error:
            assert "malformed" in str(error)  # noqa: PT017 - either end is right


@pytest.mark.parametrize("signal", ["profiles"])
def test_random_bytes_are_refused(signal):
    with pytest.raises(InputError, match="malformed protobuf of profiles"):
        decode(signal, b"\xff\xff", received_ns=NOW)
