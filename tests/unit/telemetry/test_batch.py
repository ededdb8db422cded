"""Batches: there and back, those of older agents, garbled ones, and what packing must not load."""

import struct
import subprocess
import sys

import polars as pl
import pyarrow as pa
import pytest

from kansoku.errors import InputError
from kansoku.telemetry.batch import pack_batch, unpack_batch

STEPS = pl.DataFrame({"run": ["r", "ö"], "rank": [0, 1], "step": [7, None], "start_ns": [1, 2]})
INFO = {"m": {"unit": "W", "kind": "gauge", "description": ""}}


@pytest.mark.parametrize("rows", [STEPS, STEPS.to_arrow()], ids=["polars", "arrow"])
def test_a_batch_comes_back(rows):
    tables, resource, metrics = unpack_batch(
        pack_batch({"steps": rows}, resource={"host.name": "c1"}, metrics=INFO)
    )
    assert pl.DataFrame(tables["steps"]).equals(STEPS)
    assert (resource, metrics) == ({"host.name": "c1"}, INFO)


def test_a_batch_of_an_older_agent_is_read():
    """Its spool may hold some: JSON in the schema's metadata instead of a header."""
    metadata = {
        b"kansoku.resource": b'{"host.name":"c1"}',
        b"kansoku.metrics": b'{"m":{"unit":"W"}}',
    }
    table = STEPS.to_arrow().replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    payload = b"KAB1" + struct.pack("<H", 5) + b"steps" + struct.pack("<Q", len(data)) + data
    tables, resource, metrics = unpack_batch(payload)
    assert pl.DataFrame(tables["steps"]).equals(STEPS)
    assert (resource, metrics) == ({"host.name": "c1"}, {"m": {"unit": "W"}})


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"{}", b'{"resource":1,"metrics":{}}', b'{"resource":{},"metrics":[]}'],
)
def test_a_garbled_header_is_refused(header):
    with pytest.raises(InputError, match="header is cut off or garbled"):
        unpack_batch(b"KAB2" + struct.pack("<I", len(header)) + header)


def test_a_batch_cut_anywhere_is_refused_or_shorter():
    whole = pack_batch({"steps": STEPS, "events": pl.DataFrame({"time_ns": [1], "body": ["x"]})})
    for size in range(len(whole)):
        try:
            assert len(unpack_batch(whole[:size])[0]) < 2
        except InputError:
            continue


def test_a_sender_loads_no_arrow_library(tmp_path):
    """The agent has 120 MB; PyArrow alone would take 24."""
    code = (
        "import sys, polars as pl\nfrom pathlib import Path\n"
        "import kansoku.app._agent_process\nfrom kansoku.telemetry import Exporter\n"
        "e = Exporter('http://127.0.0.1:9', spool=Path(sys.argv[1]))\n"
        "e.put('events', pl.DataFrame({'time_ns': [1], 'body': ['x']}), durable=False)\n"
        "e.put('events', pl.DataFrame({'time_ns': [2]}), durable=False)\n"
        "e.put('events', pl.DataFrame({'time_ns': [3]}))\ne.close(timeout_s=0.1)\n"
        "print([m for m in ('pyarrow', 'duckdb', 'grpc', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
