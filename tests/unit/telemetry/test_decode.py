"""OTLP to rows: by hand, bulk against the plain walk, and hostile bytes."""

import contextlib
import gzip
import zlib

import orjson
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from kansoku.errors import InputError
from kansoku.telemetry.decode import REQUESTS, decode, decode_json
from kansoku.telemetry.decode_bulk import decode_bulk
from kansoku.telemetry.decode_plain import decode_plain
from kansoku.telemetry.encode import MetricInfo, encode
from kansoku.telemetry.receive import TooLargeError, inflate

NOW = 1_800_000_000_000_000_000
QUICK = settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

# Strategies for requests

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
SCALAR = st.one_of(
    TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.integers(-5, 300),
    st.floats(allow_nan=False), st.binary(max_size=4),
)  # fmt: skip
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
OWN_KEYS = st.sampled_from(
    ["kansoku.run", "kansoku.rank", "kansoku.step", "kansoku.kind", "kansoku.id", "kansoku.parent",
     "kansoku.group", "kansoku.bytes", "kansoku.unheard", "host.name", "x"]
)  # fmt: skip
OWN_VALUES = {
    "kansoku.run": st.sampled_from(["r1", "r2"]),
    "kansoku.kind": st.sampled_from(["forward", "collective"]),
    "kansoku.group": TEXT,
    "kansoku.rank": st.integers(-(2**31), 2**31 - 1),
    "kansoku.step": st.integers(0, 5000),
    "kansoku.id": st.integers(-(2**63), 2**63 - 1),
    "kansoku.parent": st.integers(0, 200),
    "kansoku.bytes": st.integers(0, 2**40),
}


@st.composite
def attributes(draw, target):
    keys = draw(st.lists(OWN_KEYS, unique=True, max_size=6))
    for key in keys:
        usual = OWN_VALUES.get(key, VALUE)
        # Now and then a value of the wrong type.
        put(target.add(key=key).value, draw(VALUE if draw(st.integers(0, 19)) == 0 else usual))


def put(target: AnyValue, value):
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, str):
        target.string_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, bytes):
        target.bytes_value = value
    elif isinstance(value, list):
        target.array_value.SetInParent()
        for one in value:
            put(target.array_value.values.add(), one)
    else:
        target.kvlist_value.SetInParent()
        for key, one in value.items():
            put(target.kvlist_value.values.add(key=key).value, one)


TIMES = st.one_of(st.just(0), st.integers(NOW, NOW + 1000), st.integers(0, 2**64 - 1))


@st.composite
def trace_requests(draw):
    request = REQUESTS["traces"]()
    for _ in range(draw(st.integers(0, 3))):
        group = request.resource_spans.add()
        draw(attributes(group.resource.attributes))
        for _ in range(draw(st.integers(0, 2))):
            scope = group.scope_spans.add()
            for _ in range(draw(st.integers(0, 5))):
                span = scope.spans.add(name=draw(TEXT), kind=draw(st.integers(0, 5)))
                span.trace_id = draw(st.sampled_from([b"", b"\1" * 16, b"\2" * 16]))
                span.span_id = draw(st.sampled_from([b"", b"\xff" * 8, b"\3" * 8, b"short"]))
                span.parent_span_id = draw(st.sampled_from([b"", b"\4" * 8]))
                span.start_time_unix_nano = draw(TIMES)
                span.end_time_unix_nano = draw(TIMES)
                draw(attributes(span.attributes))
                if draw(st.booleans()):
                    span.status.code = draw(st.integers(0, 2))
                if draw(st.booleans()):
                    span.events.add(name="ignored")
    return request


@st.composite
def metric_requests(draw):
    request = REQUESTS["metrics"]()
    for _ in range(draw(st.integers(0, 3))):
        group = request.resource_metrics.add()
        draw(attributes(group.resource.attributes))
        scope = group.scope_metrics.add()
        for number in range(draw(st.integers(0, 4))):
            metric = scope.metrics.add(name=f"m{number}", unit=draw(st.sampled_from(["", "W"])))
            which = draw(st.sampled_from(["gauge", "sum", "none"]))
            if which == "none":
                continue
            target = getattr(metric, which)
            target.SetInParent()
            if which == "sum":
                target.aggregation_temporality = draw(st.integers(0, 2))
                target.is_monotonic = draw(st.booleans())
            for _ in range(draw(st.integers(0, 4))):
                point = target.data_points.add(time_unix_nano=draw(TIMES))
                choice = draw(st.integers(0, 5))
                if choice == 0:
                    point.as_int = draw(st.integers(-(2**63), 2**63 - 1))
                elif choice < 5:
                    point.as_double = draw(st.floats(allow_nan=False))
                point.flags = draw(st.sampled_from([0, 0, 0, 1]))
                draw(attributes(point.attributes))
    return request


def only_input_errors(function, signal, body):
    """Decode hostile bytes: rows, or an error that says so; anything else fails the test."""
    with contextlib.suppress(InputError):
        function(signal, body, received_ns=NOW)


def rows(decoded, table):
    return decoded.tables[table].to_pylist() if table in decoded.tables else []


def same(signal, table, request, key):
    plain = decode_plain(signal, request, received_ns=NOW)
    bulk = decode_bulk(signal, request.SerializeToString())
    if bulk is not None:  # else left to the plain walk: equal by construction
        equal(bulk, plain, table, key)


def equal(bulk, plain, table, key):
    assert sorted(rows(bulk, table), key=key) == sorted(rows(plain, table), key=key)
    assert (bulk.items, bulk.skipped, bulk.owners) == (plain.items, plain.skipped, plain.owners)
    # Of two descriptions of one metric in a request, either may stand.
    assert bulk.info.keys() == plain.info.keys()


@QUICK
@given(trace_requests())
def test_bulk_spans_equal_the_plain_walk(request_):
    same("traces", "spans", request_, key=lambda _: 0)  # the order is the same too


@QUICK
@given(metric_requests())
def test_bulk_points_equal_the_plain_walk(request_):
    same("metrics", "metrics", request_, key=repr)


@QUICK
@given(st.sampled_from(["traces", "metrics", "logs"]), st.binary(max_size=200))
def test_random_bytes_are_an_input_error_or_rows(signal, payload):
    only_input_errors(decode, signal, payload)


@QUICK
@given(st.data(), st.one_of(trace_requests(), metric_requests()))
def test_damaged_requests_are_an_input_error_or_rows(data, request_):
    signal = "traces" if type(request_) is REQUESTS["traces"] else "metrics"
    payload = bytearray(request_.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if payload:
            at = data.draw(st.integers(0, len(payload) - 1))
            payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for body in (bytes(payload), bytes(payload[:cut])):
        only_input_errors(decode, signal, body)


@QUICK
@given(st.sampled_from(["traces", "metrics", "logs"]), VALUE)
def test_any_json_is_an_input_error_or_rows(signal, value):
    try:
        body = orjson.dumps(value)
    except TypeError:
        return
    only_input_errors(decode_json, signal, body)


def test_spans_of_several_shapes_equal_the_plain_walk():
    """Six shapes, long texts and numbers of every width, not left to the plain walk."""
    request = REQUESTS["traces"]()
    group = request.resource_spans.add()
    put(group.resource.attributes.add(key="host.name").value, "c1")
    scope = group.scope_spans.add()
    for number in range(600):
        span = scope.spans.add(name="x" * (number % 3 * 70), trace_id=bytes([number % 5]) * 16)
        span.start_time_unix_nano = NOW + number
        span.end_time_unix_nano = NOW + 2 * number
        if number % 3 == 0:
            span.parent_span_id = b"\7" * 8
            span.kind = number % 6
        if number % 2:
            put(span.attributes.add(key="kansoku.run").value, f"r{number % 7}")
        put(span.attributes.add(key="kansoku.bytes").value, 1 << (number % 63))
        put(span.attributes.add(key="kansoku.parent").value, -number)
        put(span.attributes.add(key="kansoku.group").value, "g" * (number % 40 * 10))
        put(span.attributes.add(key="x").value, [number % 4, "y"])
        if number % 5 == 0:
            span.status.code = 2
            span.events.add(name="ignored")
            span.flags = 1
    assert decode_bulk("traces", request.SerializeToString()) is not None
    same("traces", "spans", request, key=lambda _: 0)


# By hand


def frame(table, **columns):
    return pl.DataFrame({name: [value] for name, value in columns.items()})


ROWS = {
    "spans": frame(
        "spans", run="r", rank=3, step=7, kind="collective", name="all_reduce", start_ns=NOW,
        duration_ns=100, id=5, parent=4, group="dp", sequence=9, bytes=1024, dtype="bf16",
        device="cuda:0", thread=1, cpu_ns=50, attributes='{"a":1,"b":"x"}',
    ),
    "steps": frame(
        "steps", run="r", rank=3, step=7, start_ns=NOW, duration_ns=100, data_wait_ns=10,
        forward_ns=20, complete=True, tokens=512.0, flops=1e15, energy_j=2.5,
    ),
    "events": frame(
        "events", time_ns=NOW, source="kernel", subject="gpu:c1/0", severity="critical",
        kind="xid", body="Xid 79", attributes='{"xid":79}',
    ),
    "bursts": frame(
        "bursts", node="c1", port="eth0", direction="receive", start_ns=NOW, duration_ns=900,
        peak_ratio=0.9, mean_ratio=0.1, bytes=10**6, samples=9, sampling_ns=100_000,
    ),
    "probes": frame("probes", time_ns=NOW, source="c1/m0", target="c2/m0", probes=10, lost=1),
    "findings": frame("findings", id="x", subject="rank:3", time_ns=NOW, sentence="slow",
                      confidence=0.5, evidence="[]"),
    "incidents": frame("incidents", id="i", onset_ns=NOW, time_ns=NOW, state="open"),
    "profiles": frame("profiles", run="r", rank=1, start_ns=NOW, end_ns=NOW + 1, stack="a;b",
                      value=3, unit="samples"),
    "jobs": frame("jobs", cluster="c", raw_id=12, submit_ns=NOW, job_id="12", user="u", nodes=2,
                  attributes='{"k":"v"}'),
}  # fmt: skip


@pytest.mark.parametrize("table", ROWS)
def test_rows_come_back_as_they_went(table):
    """Every column of every table survives the wire, null where it was not given."""
    requests = encode({table: ROWS[table]}, resource={"host.name": "c9"})
    ((signal, message),) = requests.items()
    decoded = decode(signal, message.SerializeToString(), received_ns=NOW)
    (row,) = decoded.tables[table].to_pylist()
    assert {k: v for k, v in row.items() if v is not None} == ROWS[table].row(0, named=True)


def test_an_open_span_stays_open():
    rows_ = ROWS["spans"].with_columns(duration_ns=pl.lit(None, pl.Int64))
    message = encode({"spans": rows_}, resource={})["traces"]
    (row,) = (
        decode("traces", message.SerializeToString(), received_ns=NOW).tables["spans"].to_pylist()
    )
    assert row["duration_ns"] is None
    assert row["id"] == 5


def test_labels_merge_the_resource_and_counters_say_so():
    rows_ = pl.DataFrame(
        {
            "metric": "hw.network.io",
            "labels": '{"nic":"m0","host.name":"own"}',
            "time_ns": [NOW],
            "value": [5.0],
        }
    )
    message = encode(
        {"metrics": rows_},
        resource={"host.name": "c9", "a": "b", "telemetry.sdk.name": "x"},
        describe=lambda _: MetricInfo(unit="By", kind="counter"),
    )["metrics"]
    decoded = decode("metrics", message.SerializeToString(), received_ns=NOW)
    (row,) = decoded.tables["metrics"].to_pylist()
    assert row["labels"] == '{"a":"b","host.name":"own","nic":"m0"}'
    assert decoded.info["hw.network.io"][1:3] == ("By", "counter")


def test_a_histogram_becomes_cumulative_buckets():
    """Bounds 1, 2 with counts 3, 4, 5: le=1 is 3, le=2 is 7, le=+Inf is 12."""
    request = REQUESTS["metrics"]()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="d")
    metric.histogram.aggregation_temporality = 2
    metric.histogram.data_points.add(
        time_unix_nano=NOW, explicit_bounds=[1.0, 2.0], bucket_counts=[3, 4, 5], count=12, sum=20.5
    )
    decoded = decode("metrics", request.SerializeToString(), received_ns=NOW)
    found = {(r["metric"], r["labels"]): r["value"] for r in decoded.tables["metrics"].to_pylist()}
    assert found == {
        ("d_bucket", '{"le":"1.0"}'): 3,
        ("d_bucket", '{"le":"2.0"}'): 7,
        ("d_bucket", '{"le":"+Inf"}'): 12,
        ("d_count", "{}"): 12,
        ("d_sum", "{}"): 20.5,
    }


def test_an_exponential_histogram_becomes_cumulative_buckets():
    """Scale 0, base 2: offset 0 counts 1, 2 are (1, 2] and (2, 4]; zero bucket holds 5."""
    request = REQUESTS["metrics"]()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="d")
    point = metric.exponential_histogram.data_points.add(
        time_unix_nano=NOW, scale=0, zero_count=5, count=8
    )
    point.positive.bucket_counts.extend([1, 2])
    decoded = decode("metrics", request.SerializeToString(), received_ns=NOW)
    buckets = [r for r in decoded.tables["metrics"].to_pylist() if r["metric"] == "d_bucket"]
    assert [(orjson.loads(r["labels"])["le"], r["value"]) for r in buckets] == [
        ("0.0", 5), ("2.0", 6), ("4.0", 8), ("+Inf", 8),
    ]  # fmt: skip


def test_a_foreign_log_record_becomes_an_event():
    request = REQUESTS["logs"]()
    group = request.resource_logs.add()
    put(group.resource.attributes.add(key="service.name").value, "sshd")
    put(group.resource.attributes.add(key="host.name").value, "c7")
    record = group.scope_logs.add().log_records.add(severity_number=13)
    put(record.body, "login")
    put(record.attributes.add(key="user").value, "root")
    (row,) = (
        decode("logs", request.SerializeToString(), received_ns=NOW).tables["events"].to_pylist()
    )
    assert row == {
        "time_ns": NOW, "source": "sshd", "subject": "node:c7", "severity": "warning",
        "kind": None, "body": "login", "attributes": '{"user":"root"}',
    }  # fmt: skip


def test_json_bodies_say_ids_in_hex():
    """OTLP's JSON differs from protobuf's own: ids are hex."""
    body = orjson.dumps(
        {"resourceSpans": [{"scopeSpans": [{"spans": [
            {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174",
             "name": "x", "kind": 2, "startTimeUnixNano": str(NOW),
             "endTimeUnixNano": str(NOW + 5)}]}]}]}
    )  # fmt: skip
    (row,) = decode_json("traces", body, received_ns=NOW).tables["spans"].to_pylist()
    assert row["run"] == "5b8efff798038103d269b633813fc60c"
    assert row["id"] == int("eee19b7ec3c1b174", 16) - 2**64
    assert (row["kind"], row["duration_ns"]) == ("server", 5)


def test_bombs_are_cut_off():
    bomb = gzip.compress(bytes(50 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(TooLargeError, match="inflates beyond"):
        inflate(bomb, "gzip", 1 << 20)
    with pytest.raises(TooLargeError):
        inflate(zlib.compress(bytes(5 << 20)), "deflate", 1 << 20)
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(bytes(5 << 20))
    with pytest.raises(TooLargeError):
        inflate(sink.getvalue().to_pybytes(), "zstd", 1 << 20)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_broken_compression_is_an_input_error(encoding):
    with pytest.raises(InputError, match="broken"):
        inflate(b"not compressed", encoding, 1000)
    with pytest.raises(InputError, match="not gzip"):
        inflate(b"", "brotli", 1000)


def test_cut_gzip_is_an_input_error():
    with pytest.raises(InputError, match="cut off"):
        inflate(gzip.compress(b"x" * 1000)[:-9], "gzip", 10_000)
