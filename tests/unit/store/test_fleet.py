"""What fleet back ends are asked, and how their answers become rows.

VictoriaLogs, VictoriaTraces and Jaeger are stood in for by fakes at the wire: their answers have
the documented form (field names of OTLP attributes, Jaeger's JSON), not the program's own output.
"""

from urllib.parse import parse_qs

import httpx
import orjson
import polars as pl
import pytest

from kansoku.errors import ConfigurationError, InputError, StoreError
from kansoku.store import Matcher
from kansoku.store.fleet import (
    BackEnd,
    FleetStore,
    JaegerSpans,
    LogsqlEvents,
    LogsqlSpans,
    Naming,
)
from kansoku.store.fleet.logsql import time_ns_of

NOW = 1_800_000_000_123_456_789


class Wire:
    """A back end that remembers what it was asked and answers from a list."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, request):
        body = {k: v[0] for k, v in parse_qs(request.content.decode()).items()}
        self.asked.append((request.url.path, dict(request.url.params) | body))
        answer = self.answers.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=answer)


def back_end(wire):
    return BackEnd("http://wire", transport=httpx.MockTransport(wire))


def lines(*entries):
    return b"\n".join(orjson.dumps(entry) for entry in entries)


def test_time_to_the_nanosecond():
    assert time_ns_of("2027-01-15T08:00:00.123456789Z") == NOW
    assert time_ns_of("2027-01-15T17:00:00.1+09:00") == 1_800_000_000_100_000_000
    with pytest.raises(StoreError):
        time_ns_of("yesterday")


def test_steps_by_logsql():
    wire = Wire(
        lines(
            {"_time": "2027-01-15T08:00:00.123456789Z", "event.name": "kansoku.steps",
             "kansoku.run": "r", "kansoku.rank": "3", "kansoku.duration_ns": "100",
             "kansoku.complete": "true", "kansoku.tokens": "512.5"},
        )
    )  # fmt: skip
    frame = LogsqlEvents(back_end(wire)).table("steps", NOW - 10, NOW + 10, {"run": 'a"b'})
    path, asked = wire.asked[0]
    assert path == "/select/logsql/query"
    assert asked["query"].startswith(
        r'"event.name":="kansoku.steps" "kansoku.run":="a\"b" | sort by (_time desc) limit'
    )
    assert (asked["start"], asked["end"]) == (str(NOW - 10), str(NOW + 9))
    row = frame.row(0, named=True)
    assert (row["run"], row["rank"], row["start_ns"], row["tokens"]) == ("r", 3, NOW, 512.5)
    assert row["complete"] is True
    assert row["energy_j"] is None


def test_events_by_logsql():
    wire = Wire(
        lines(
            {"_time": "2027-01-15T08:00:00Z", "_msg": "Xid 79", "severity": "Critical",
             "kansoku.source": "kernel", "kansoku.subject": "gpu:c1/0", "xid": "79",
             "_stream": "{}", "_stream_id": "0"},
        )
    )  # fmt: skip
    store = FleetStore(logs=LogsqlEvents(back_end(wire)))
    row = store.events(NOW - 10**12, NOW, contains="Xid", subject="gpu:c1/0").row(0, named=True)
    assert row["attributes"] == '{"xid":"79"}'
    assert (row["severity"], row["body"], row["kind"]) == ("critical", "Xid 79", None)
    assert '_msg:~"Xid"' in wire.asked[0][1]["query"]


def test_spans_by_logsql_and_jaeger():
    entry = {
        "_time": "2027-01-15T08:00:00Z", "name": "all_reduce", "trace_id": "ab" * 16,
        "span_id": "ff" * 8, "start_time_unix_nano": str(NOW),
        "end_time_unix_nano": str(NOW + 500), "kind": "1", "span_attr:kansoku.run": "r",
        "span_attr:kansoku.rank": "1", "span_attr:kansoku.kind": "collective",
        "resource_attr:service.name": "train",
    }  # fmt: skip
    wire = Wire(lines(entry))
    row = LogsqlSpans(back_end(wire)).table(NOW, NOW + 1, {"run": "r"}).row(0, named=True)
    assert (row["start_ns"], row["duration_ns"], row["rank"]) == (NOW, 500, 1)
    assert f'"start_time_unix_nano":>={NOW}' in wire.asked[0][1]["query"]

    span = {
        "traceID": "ab" * 16, "spanID": "01", "operationName": "all_reduce",
        "startTime": NOW // 1000, "duration": 7, "references": [], "processID": "p1",
        "tags": [{"key": "kansoku.run", "type": "string", "value": "r"},
                 {"key": "kansoku.rank", "type": "int64", "value": 1},
                 {"key": "extra", "type": "bool", "value": True}],
    }  # fmt: skip
    wire = Wire(b'{"data":["train"]}', orjson.dumps({"data": [{"traceID": "x", "spans": [span]}]}))
    reader = JaegerSpans(back_end(wire))
    row = reader.table(NOW - 10**6, NOW + 1, {"run": "r"}).row(0, named=True)
    assert (row["start_ns"], row["duration_ns"]) == (NOW // 1000 * 1000, 7000)
    assert row["attributes"] == '{"extra":true}'
    assert orjson.loads(wire.asked[1][1]["tags"]) == {"kansoku.run": "r"}


def test_named_queries_run_on_fetched_rows():
    entries = [
        {"_time": "2027-01-15T08:00:00Z", "kansoku.run": "r", "kansoku.rank": str(rank),
         "kansoku.step": "1", "kansoku.duration_ns": str(duration), "kansoku.collective_ns": "2"}
        for rank, duration in ((0, 10), (1, 30))
    ]  # fmt: skip
    wire = Wire(lines(*entries))
    store = FleetStore(logs=LogsqlEvents(back_end(wire)))
    row = store.query("step_phases", run="r", since_ns=NOW - 10**12, until_ns=NOW).row(
        0, named=True
    )
    assert (row["duration_ns"], row["slowest_rank"], row["ranks"]) == (30, 1, 2)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigurationError, match=r"stores\.metrics"):
        FleetStore().latest("m")
    with pytest.raises(ConfigurationError, match=r"stores\.kansoku"):
        FleetStore().table("jobs")


def test_errors_name_the_back_end():
    wire = Wire(httpx.Response(400, text="bad query"), httpx.Response(502), b"not json")
    reader = LogsqlEvents(back_end(wire))
    with pytest.raises(InputError, match="http://wire"):
        reader.table("steps", 0, 1, None)
    with pytest.raises(StoreError, match="502"):
        reader.table("steps", 0, 1, None)
    with pytest.raises(StoreError, match="garbled"):
        reader.table("steps", 0, 1, None)


def test_selectors_are_quoted():
    naming = Naming()
    matchers = [Matcher.parse('host.name=a"b\\'), Matcher.parse("gpu=~[0-3]")]
    assert naming.selector("hw.gpu.power", matchers) == (
        r'{__name__="hw_gpu_power",host_name="a\"b\\",gpu=~"[0-3]"}'
    )
    verbatim = Naming(style="verbatim", suffixes={"m": "_total"})
    assert verbatim.selector("m", matchers[:1]) == r'{__name__="m_total",host\.name="a\"b\\"}'
    assert naming.back({"host_name": "c", "__name__": "x", "odd_one": "1"}, ["odd.one"]) == {
        "host.name": "c", "odd.one": "1",
    }  # fmt: skip


def test_written_rows_conform():
    sent = {}
    store = FleetStore(write=sent.update)
    store.append("steps", pl.DataFrame({"run": ["r"]}))
    assert sent["steps"].column_names[:3] == ["run", "rank", "step"]
    with pytest.raises(InputError, match="colour"):
        store.append("steps", pl.DataFrame({"colour": ["red"]}))
