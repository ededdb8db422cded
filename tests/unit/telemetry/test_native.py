"""The compiled span reader: equal to the general one, and within the bytes it is given."""

import random
import shutil
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.labs.sanitized import run_sanitized

from kansoku.errors import InputError
from kansoku.telemetry import _native, decode_bulk
from kansoku.telemetry.decode import REQUESTS, decode

NOW = 1_800_000_000_000_000_000
SOURCE = Path(_native.__file__).with_name("span_reader.c")


def body(seed, spans=30):
    """Return spans of many shapes: fields and attributes left out, long texts, foreign ones."""
    draw = random.Random(seed)
    request = REQUESTS["traces"]()
    for host in range(draw.randint(1, 3)):
        group = request.resource_spans.add()
        if host:
            group.resource.attributes.add(key="host.name").value.string_value = f"c{host}"
        scope = group.scope_spans.add(schema_url="s")
        for number in range(draw.randint(0, spans)):
            span = scope.spans.add(name="é" * draw.choice((0, 3, 200)), kind=draw.randint(0, 5))
            span.trace_id = draw.choice((b"", b"\1" * 16, draw.randbytes(16)))
            span.span_id = draw.choice((b"", draw.randbytes(8)))
            span.start_time_unix_nano = draw.choice((0, NOW + number, 2**64 - 1))
            span.end_time_unix_nano = NOW + draw.randint(0, 2000)
            for key in draw.sample(("run", "rank", "id", "group", "x", "y"), draw.randint(0, 6)):
                value = span.attributes.add(key=f"kansoku.{key}").value
                if key in {"rank", "id"}:
                    value.int_value = draw.choice((0, -1, 127, 128, 2**31 - 1))
                else:
                    value.string_value = draw.choice(("", "r1", "long " * 90))
            if draw.random() < 0.3:
                span.status.code, span.flags, span.trace_state = draw.randint(0, 2), 1, "a=b"
                span.events.add(name="ignored")
    return request.SerializeToString()


def rows(payload, read=_native.read_spans):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_bulk, "read_spans", read)
        decoded = decode_bulk.decode_bulk("traces", payload)
    if decoded is None:
        return None
    found = decoded.tables["spans"].to_pylist() if decoded.tables else []
    return found, decoded.items, decoded.owners


@pytest.fixture(scope="module")
def compiler():
    """The machine's C compiler; the tests' machines have one."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert found, "no C compiler on PATH"
    return found


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("seed", range(60))
def test_the_compiled_reader_equals_the_general_one(seed):
    payload = body(seed)
    assert _native.read_spans(payload) is not None or not payload
    assert rows(payload) == rows(payload, lambda _: None)


@pytest.mark.usefixtures("compiler")
def test_by_hand():
    request = REQUESTS["traces"]()
    request.resource_spans.add()
    span = request.resource_spans.add().scope_spans.add().spans.add(name="step", kind=2)
    span.attributes.add(key="a").value.int_value = 300
    span.status.code = 2
    read = _native.read_spans(request.SerializeToString())
    assert (read.fields.count, read.resources, read.group_of.tolist()) == (1, [b"", b""], [1])
    assert read.fields.name.to_pylist() == ["step"]
    assert read.fields.kind.tolist() == [2]
    assert read.fields.failed.tolist() == [True]
    # An AnyValue's int_value is field 3: tag 0x18, then 300 as a varint.
    assert read.fields.attributes["a"].raw(0) == b"\x18\xac\x02"


def wrapped(span):
    """Return a request around the bytes of one span (shorter than 124)."""
    scope = b"\x12" + bytes([len(span)]) + span
    group = b"\x12" + bytes([len(scope)]) + scope
    return b"\x0a" + bytes([len(group)]) + group


@pytest.mark.parametrize(
    "span",
    [
        pytest.param(b"\x2a\x01a\x2a\x01b", id="a name twice"),
        pytest.param(b"\x29" + bytes(8), id="a name as a number"),
        pytest.param(b"\x2a\x01\xff", id="a name that is no UTF-8"),
        pytest.param(b"\x4a\x03\x0a\x01\xff", id="a key that is no UTF-8"),
        pytest.param(b"\x2b\x2c", id="a group"),
        pytest.param(b"\x2a\x7fa", id="a length beyond the span"),
        pytest.param(b"\x30" + b"\xff" * 11, id="an endless number"),
        pytest.param(b"\x02\x00", id="field number 0"),
    ],
)
def test_what_is_unusual_or_broken_is_left_to_the_general_reader(span):
    assert _native.read_spans(wrapped(span)) is None


def test_unknown_fields_are_skipped():
    """Field 100 of every wire type, between fields that are read."""
    extra = b"\xa0\x06\x07\xa1\x06" + bytes(8) + b"\xa2\x06\x02ab\xa5\x06" + bytes(4)
    span = Span(name="n").SerializeToString() + extra + Span(kind=3).SerializeToString()
    read = _native.read_spans(wrapped(span))
    assert (read.fields.name.to_pylist(), read.fields.kind.tolist()) == (["n"], [3])


def test_more_keys_than_fit_are_left_to_the_general_reader():
    request = REQUESTS["traces"]()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    for number in range(257):
        span.attributes.add(key=f"k{number}").value.int_value = number
    assert _native.read_spans(request.SerializeToString()) is None
    del span.attributes[-1]
    assert len(_native.read_spans(request.SerializeToString()).fields.attributes) == 256


def test_without_a_compiler_the_general_reader_reads(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    _native.library.cache_clear()
    try:
        payload = body(1)
        assert _native.read_spans(payload) is None
        decoded = decode("traces", payload, received_ns=NOW)
        assert decoded.tables["spans"].num_rows == decoded.items > 0
    finally:
        _native.library.cache_clear()


HARNESS = """
#include "{source}"
#include <stdio.h>
#include <stdlib.h>
int main(void)
{{
    int64_t size, counts[4], keys[3 * KEYS], read = 0;
    while (fread(&size, 8, 1, stdin) == 1) {{
        uint8_t *data = malloc(size ? size : 1); /* exactly as long as the body */
        if (size && fread(data, size, 1, stdin) != 1)
            return 2;
        if (!span_reader_measure(data, size, counts, keys)) {{
            int64_t *groups = calloc(counts[0] * 3 + 1, 8);
            int64_t *spans = calloc(counts[1] * COLUMNS + 1, 8);
            int64_t *attributes = calloc(counts[2] * 3 + 1, 8);
            if (span_reader_fill(data, size, counts, keys, groups, spans, attributes))
                return 3;
            for (int64_t i = 0; i < counts[2]; i++)
                if (attributes[i] < 0 || attributes[i] >= counts[1]
                    || attributes[counts[2] + i] + attributes[2 * counts[2] + i] > size)
                    return 4;
            free(groups), free(spans), free(attributes);
            read++;
        }}
        free(data);
    }}
    printf("%ld\\n", (long)read);
    return 0;
}}
"""


@pytest.mark.usefixtures("compiler")
def test_damaged_bodies_stay_within_their_bytes(tmp_path):
    draw = random.Random(7)
    stream = bytearray()
    bodies = 0
    for seed in range(40):
        whole = body(seed, 8)
        for _ in range(100):
            hurt = bytearray(whole)
            for _ in range(draw.randint(0, 4)):
                if hurt:
                    hurt[draw.randrange(len(hurt))] = draw.choice((0, 0x7F, 0x80, 0xFF, 0x4A))
            cut = hurt if draw.random() < 0.7 else hurt[: draw.randint(0, len(hurt))]
            stream += len(cut).to_bytes(8, "little") + cut
            bodies += 1
    read = run_sanitized(tmp_path, HARNESS.format(source=SOURCE), bytes(stream))
    assert 400 < read < bodies  # some were read whole, some refused


@pytest.mark.usefixtures("compiler")
def test_damaged_bodies_have_the_general_readers_answer():
    draw = random.Random(11)
    for seed in range(300):
        hurt = bytearray(body(seed, 4))
        for _ in range(draw.randint(1, 3)):
            if hurt:
                hurt[draw.randrange(len(hurt))] = draw.randrange(256)
        payload = bytes(hurt)
        assert outcome(payload) == outcome(payload, lambda _: None)


def outcome(payload, read=_native.read_spans):
    try:
        return rows(payload, read)
    except InputError:
        return "refused"
