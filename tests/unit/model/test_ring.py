"""The ring file: layout by hand, wrapping, late completion, damage."""

import ast
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.model import ring


def make(size=1 << 17, shares=(1,)):
    buffer = bytearray(size)
    ring.format_ring(buffer, pid=77, process_start=5, anchor=(1_000, 10**18), lane_shares=shares)
    return buffer


def record_at(buffer, n, lane=0):
    header = ring.read_header(buffer)
    offset = header.lanes[lane].offset + (n - 1) % header.lanes[lane].capacity * 128
    return {
        name: struct.unpack_from("<" + code, buffer, offset + at)[0]
        for name, at, code in ring.RECORD_FIELDS
    }


def test_header_bytes_by_hand():
    buffer = make()
    assert bytes(buffer[:8]) == b"KANSOKU\n"
    assert struct.unpack_from("<IIII", buffer, 8) == (1, 4096, 128, 1)
    assert bytes(buffer[24:28]) == b"\x04\x03\x02\x01"
    assert struct.unpack_from("<QQ", buffer, 80) == (77, 5)
    header = ring.read_header(buffer)
    assert (header.pid, header.rank, header.step, header.state) == (77, None, None, ring.RECORDING)
    assert header.anchor == (1_000, 10**18)


def test_fields_fill_the_record_without_gap_or_overlap():
    at = 0
    for _, offset, code in ring.RECORD_FIELDS:
        assert offset == at
        at += struct.calcsize("<" + code)
    assert at == ring.RECORD_BYTES


def test_a_span_is_there_open_and_then_closed():
    buffer = make()
    writer = ring.RingWriter(buffer)
    template = ring.pack_template(
        ring.KIND_CODES["forward"], name=writer.intern("GPT"), thread=42, sequence=3, bytes_=9
    )
    span = writer.open(template, 5_000, 7, 0)
    row = record_at(buffer, 1)
    assert (row["id"], row["id_again"], row["start_ns"], row["duration_ns"]) == (1, 1, 5_000, -1)
    assert (row["step"], row["kind"], row["thread"], row["sequence"], row["bytes"]) == (
        7, 3, 42, 3, 9,
    )  # fmt: skip
    writer.close(span, 5_000, 5_400, 120)
    row = record_at(buffer, 1)
    assert (row["duration_ns"], row["cpu_ns"]) == (400, 120)
    assert ring.read_strings(buffer, ring.read_header(buffer)) == ["", "GPT"]


def test_a_long_span_is_completed_after_its_slot_was_overwritten():
    buffer = make()
    writer = ring.RingWriter(buffer)
    capacity = ring.read_header(buffer).lanes[0].capacity
    template = ring.pack_template(1)
    long = writer.open(template, 0, 0, 0)
    writer.remember(long, template, 0, 0)
    for number in range(capacity):
        writer.close(writer.open(template, number, 0, long), number, number + 1, -1)
    assert not writer.holds(long)
    writer.set_values(long, value_a=12.0)
    writer.close(long, 0, 999, 3)
    row = record_at(buffer, capacity + 2)
    assert (row["origin"], row["duration_ns"], row["value_a"]) == (long, 999, 12.0)
    assert row["flags"] & ring.FLAG_LATE


def test_a_phase_is_noted_counted_and_completed():
    buffer = make()
    writer = ring.RingWriter(buffer)
    capacity = ring.read_header(buffer).lanes[0].capacity
    span = writer.begin(ring.pack_template(3), 5_000, 7, 0)
    assert ring.read_header(buffer).open_phase == span == 1
    assert writer.end(span, 3, 5_000, 5_400, 120, 4096, 2.5, 8.0, 0)
    row = record_at(buffer, 1)
    assert (row["duration_ns"], row["cpu_ns"], row["peak_rss_bytes"]) == (400, 120, 4096)
    assert (row["value_a"], row["value_b"]) == (2.5, 8.0)
    header = ring.read_header(buffer)
    assert (header.open_phase, header.counts) == (0, {"forward": (1, 0)})
    lost = writer.begin(ring.pack_template(3), 0, 0, 0)
    for number in range(capacity):
        writer.open(ring.pack_template(4), number, 0, 0)
    assert not writer.end(lost, 0, 0, 9, 0, 0, 0.0, 0.0, 0)
    assert record_at(buffer, capacity + 2)["duration_ns"] == ring.OPEN  # whose slot it is now


def test_a_short_span_whose_slot_is_gone_is_counted():
    buffer = make()
    writer = ring.RingWriter(buffer)
    template = ring.pack_template(3)
    lost = writer.open(template, 0, 0, 0)
    for number in range(ring.read_header(buffer).lanes[0].capacity):
        writer.open(template, number, 0, 0)
    writer.close(lost, 0, 5, -1)
    assert ring.read_header(buffer).not_written == 1


def test_lanes_do_not_touch():
    buffer = make(shares=(1, 3))
    first, second = ring.read_header(buffer).lanes
    assert first.offset + first.capacity * 128 == second.offset
    assert second.offset + second.capacity * 128 <= len(buffer)
    writer = ring.RingWriter(buffer, lane=1)
    assert writer.open(ring.pack_template(6), 1, 0, 0) == 1 << 56 | 1
    assert record_at(buffer, 1, lane=0)["id"] == 0
    assert record_at(buffer, 1, lane=1)["id"] == 1 << 56 | 1


def test_facts_are_replaced_whole_or_not_at_all():
    buffer = make()
    writer = ring.RingWriter(buffer)
    assert writer.set_facts({"node": "n1", "groups": [{"name": "0", "ranks": [0, 1]}]})
    assert not writer.set_facts({"node": "x" * 100_000})
    assert ring.read_facts(buffer, ring.read_header(buffer))["node"] == "n1"


def test_strings_that_do_not_fit_are_counted():
    buffer = make()
    writer = ring.RingWriter(buffer)
    known = writer.intern("a")
    for number in range(2_000):
        writer.intern(f"{number:0100d}")
    assert writer.intern("a") == known
    assert writer.intern("x" * 1_000) == 0
    assert ring.read_header(buffer).strings_dropped > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b[:100], "fewer than a header"),
        (lambda b: b"X" + b[1:], "not a ring file"),
        (lambda b: b[:8] + struct.pack("<I", 2) + b[12:], "ring format 2"),
        (lambda b: b[:24] + b"\x01\x02\x03\x04" + b[28:], "byte order"),
        (lambda b: b[:20] + struct.pack("<I", 99) + b[24:], "damaged"),
    ],
)
def test_refusals_say_what_is_wrong(change, says):
    with pytest.raises(ring.RingError, match=says):
        ring.read_header(change(bytes(make())))


def test_too_small_is_refused():
    with pytest.raises(ring.RingError, match="too few"):
        make(size=6_000)


@given(st.binary(max_size=6_000), st.binary(max_size=200))
def test_hostile_headers_never_crash(tail, spoiled):
    buffer = bytearray(make()[:4096] + tail)
    buffer[28 : 28 + len(spoiled)] = spoiled
    try:
        header = ring.read_header(buffer)
    except ring.RingError:
        return
    ring.read_strings(buffer, header)
    ring.read_facts(buffer, header)


def test_runs_on_python_3_9_with_the_standard_library_alone():
    source = Path(ring.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 9))
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names == {"__future__", "itertools", "json", "struct", "collections.abc", "typing"}
