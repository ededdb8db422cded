"""Datagrams as libkineto's headers lay them out, written here byte by byte."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.errors import InputError
from kansoku.formats.kineto_daemon import Register, Request, encode_reply, parse_message


def message(kind, body):
    return struct.pack("<Q", len(body)) + kind.ljust(32, b"\0") + body


def test_a_registration():
    # struct LibkinetoContext {int32 gpu; pid_t pid; int64 jobid;}
    datagram = message(b"ctxt", bytes.fromhex("02000000 d2040000 4e61bc0000000000"))
    found = parse_message(datagram)
    assert found == Register(device=2, pid=1234, job=12345678)
    assert encode_reply(found, count=1) == message(b"ctxt", b"\1\0\0\0")


def test_a_request_and_its_answer():
    # struct LibkinetoRequest {int type; int n; int64 jobid; int32 pids[n];}
    datagram = message(b"req", struct.pack("<iiqiii", 3, 3, 7, 100, 10, 1))
    found = parse_message(datagram)
    assert found == Request(type=3, job=7, pids=(100, 10, 1))
    assert encode_reply(found) == message(b"req", b"")
    assert encode_reply(found, config="A=1") == message(b"req", b"A=1")
    assert len(encode_reply(found)) == 40


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\0" * 39,
        message(b"what", b"1234"),
        message(b"ctxt", b"short"),
        message(b"req", struct.pack("<iiq", 2, 5, 0)),
        message(b"req", struct.pack("<iiq", 2, -1, 0)),
        message(b"req", struct.pack("<iiqi", 2, 1, 0, 5))[:-1],
        struct.pack("<Q", 1 << 60) + b"req".ljust(32, b"\0"),
    ],
)
def test_what_is_no_message(bad):
    with pytest.raises(InputError):
        parse_message(bad)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data):
    with contextlib.suppress(InputError):
        parse_message(data)
