"""The server over real sockets: protocols, refusals, tenants, the described API."""

import contextlib
import gzip
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import orjson
import polars as pl
import pyarrow as pa
import pytest

from kansoku.app.serve import Access, Server, ServeSettings
from kansoku.app.store import open_store
from kansoku.errors import ConfigurationError, StoreError
from kansoku.model import Origin
from kansoku.store import HttpStore
from kansoku.telemetry import Exporter, IntakeLimits, MetricInfo
from kansoku.telemetry.decode import REQUESTS
from kansoku.telemetry.encode import encode

HOUR = 3600 * 10**9
NOW = 500_000 * HOUR
PROTOBUF = {"content-type": "application/x-protobuf"}


def clock():
    return NOW


def frames():
    return {
        "metrics": pl.DataFrame(
            {"metric": "hw.gpu.power", "labels": ['{"gpu":"0"}', '{"gpu":"1"}'],
             "time_ns": [NOW - 10**9] * 2, "value": [400.0, 500.0]}
        ),
        "steps": pl.DataFrame({"run": ["r1", "r2"], "rank": [0, 0], "step": [1, 1],
                               "start_ns": [NOW - 10**9] * 2, "duration_ns": [5, 6]}),
        "spans": pl.DataFrame({"run": ["r1", "r2"], "kind": "forward", "name": "secret layer",
                               "start_ns": [NOW - 10**9] * 2, "id": [1, 2],
                               "attributes": '{"a":1}'}),
        "events": pl.DataFrame({"time_ns": [NOW - 5, NOW - 4], "subject": ["job:7", "node:c1"],
                                "body": ["mine", "theirs"]}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = ServeSettings(
        folder=tmp_path_factory.mktemp("serve"), port=0, otlp_port=0, grpc_port=0,
        intake=IntakeLimits(max_body_bytes=100_000, max_inflated_bytes=1_000_000),
    )  # fmt: skip
    with Server(settings, clock_ns=clock) as server:
        yield server


@pytest.mark.parametrize("protocol", ["arrow", "http", "grpc"])
def test_every_protocol_brings_the_same_rows(server, tmp_path, protocol):
    port = server.grpc_port if protocol == "grpc" else server.otlp_port
    exporter = Exporter(
        f"http://127.0.0.1:{port}", spool=tmp_path, protocol=protocol,
        resource={"host.name": protocol}, describe=lambda _: MetricInfo(unit="W"),
    )  # fmt: skip
    exporter.put_tables(frames())
    assert exporter.flush(20), exporter.counts
    assert exporter.counts.rows_delivered == 8
    exporter.close()
    latest = server.store.latest("hw.gpu.power", {"host.name": protocol})
    assert latest["value"].to_list() == [400.0, 500.0]
    with open_store(server.settings.folder) as over_http:
        assert isinstance(over_http, HttpStore)
        assert over_http.latest("hw.gpu.power", {"host.name": protocol}).equals(latest)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_profiles_travel_as_profiles(server, tmp_path, protocol):
    rows = pl.DataFrame(
        {"run": f"p-{protocol}", "rank": [0, 0], "start_ns": NOW - 9, "end_ns": NOW - 4,
         "stack": ["main;step", "main"], "value": [3, 2], "unit": "samples"}
    )  # fmt: skip
    port = server.grpc_port if protocol == "grpc" else server.otlp_port
    sent = server.intake.counts.items
    exporter = Exporter(f"http://127.0.0.1:{port}", spool=tmp_path, protocol=protocol)
    exporter.put("profiles", rows)
    assert exporter.flush(60), exporter.counts
    exporter.close()
    kept = server.store.table("profiles", filters={"run": f"p-{protocol}"})
    assert sorted(kept["stack"].to_list()) == ["main", "main;step"]
    assert server.intake.counts.items == sent + 2


def test_a_receiver_without_profiles_gets_log_records(tmp_path):
    """It answers 404 to the unknown path, as a collector without the signal does."""
    asked = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.path)
            self.send_response(200 if self.path == "/v1/logs" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{receiver.server_port}"
    exporter = Exporter(url, spool=tmp_path, protocol="http")
    rows = pl.DataFrame({"run": "r", "rank": [0], "start_ns": [NOW], "stack": "a", "value": [1]})
    for _ in range(2):
        exporter.put("profiles", rows)
    assert exporter.flush(60), exporter.counts
    assert exporter.counts.rows_delivered == 2
    exporter.close()
    receiver.shutdown()
    receiver.server_close()
    assert asked == ["/v1development/profiles", "/v1/logs", "/v1/logs"]


def post(server, path, content, **headers):
    return httpx.post(
        f"http://127.0.0.1:{server.otlp_port}{path}", content=content, headers=PROTOBUF | headers
    )


def test_hostile_requests_get_clear_refusals_and_are_counted(server):
    counts = server.intake.counts
    before = (counts.malformed, counts.too_large, counts.wrong_type)
    assert post(server, "/v1/traces", b"\xff\xff\xff").status_code == 400
    assert post(server, "/v1/logs", b"\x0a\x05abc").status_code == 400
    assert post(server, "/v1/kansoku/batch", b"x").status_code == 415
    assert post(server, "/v1/metrics", bytes(200_000)).status_code == 413
    bomb = gzip.compress(bytes(20_000_000))
    assert post(server, "/v1/metrics", bomb, **{"content-encoding": "gzip"}).status_code == 413
    assert post(server, "/v1/metrics", b"x", **{"content-encoding": "gzip"}).status_code == 400
    assert post(server, "/v1/metrics", b"", **{"content-type": "text/csv"}).status_code == 415
    arrow = {"content-type": "application/vnd.kansoku.arrow"}
    assert post(server, "/v1/kansoku/batch", b"KAB1\x01", **arrow).status_code == 400
    odd = {"kansoku-agent": "a", "kansoku-sequence": "-1"}
    assert post(server, "/v1/traces", b"", **odd).status_code == 400
    after = (counts.malformed, counts.too_large, counts.wrong_type)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (4, 2, 2)
    assert post(server, "/v1/traces", b"").status_code == 200


def test_grpc_refuses_malformed_and_oversized(server):
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for compression in (None, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError) as caught:
                call(bytes(20_000_000), compression=compression)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_repeated_body_is_kept_once(server):
    """A foreign sender that repeats its request after a lost answer repeats its bytes."""
    rows = frames()["events"].with_columns(body=pl.lit("once"))
    body = encode({"events": rows}, resource={})["logs"].SerializeToString()
    for _ in range(3):
        assert post(server, "/v1/logs", body).status_code == 200
    assert len(server.store.events(contains="once")) == 2


def test_partial_success_says_what_was_refused(server):
    request = REQUESTS["metrics"]()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="x")
    metric.gauge.data_points.add(as_double=1, time_unix_nano=NOW + 5 * HOUR)
    metric.gauge.data_points.add(as_double=2, time_unix_nano=NOW)
    metric.gauge.data_points.add(as_double=3)
    answer = post(server, "/v1/metrics", request.SerializeToString())
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceResponse,
    )

    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_data_points == 2
    assert partial.error_message == "1 future, 1 no_time"
    assert server.store.latest("x")["value"].to_list() == [2.0]


def test_counts_add_up(server):
    # Rows are kept, and their sender told, a moment before they stop pending.
    deadline = time.monotonic() + 20
    while server.store.statistics()["rows_pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
    statistics = server.statistics()
    intake, store = statistics["intake"], statistics["store"]
    assert intake["rows"] == intake["kept"] + intake["duplicate"] + sum(intake["rejected"].values())
    assert store["rows_in"] == (
        store["rows_kept"] + store["rows_duplicate"] + store["rows_failed"]
        + store["rows_pending"] + sum(store["rows_rejected"].values())
    )  # fmt: skip
    answered = (
        "accepted",
        "malformed",
        "too_large",
        "wrong_type",
        "unauthorized",
        "busy",
        "failed",
    )
    assert intake["requests"] <= sum(intake[name] for name in answered)


def test_http_store_is_a_store(server):
    with HttpStore(server.url) as store:
        listener = store.subscribe(["steps"])
        rows = pl.DataFrame({"run": ["h"], "rank": [1], "step": [2], "start_ns": [NOW]})
        assert store.append("steps", rows).rows == {"steps": 1}
        received = listener.get(10)
        assert received is not None
        assert received[1]["run"].to_list() == ["h"]
        listener.close()
        origin = Origin(agent="a", sequence=1)
        assert not store.commit({"steps": rows}, origin=origin).duplicate
        assert store.commit({"steps": rows}, origin=origin).duplicate
        assert store.table("steps", filters={"run": ["h"]}).height == 2
        assert store.query("rank_phases", run="h")["steps"].to_list() == [2]
        assert "hw.gpu.power" in store.metrics()["metric"].to_list()
    with pytest.raises(StoreError, match="is kansoku serve running"):
        HttpStore("http://127.0.0.1:1").query("runs")


# Who may see what

TOKENS = {"op": "operator", "alice": "tenant", "bob": "tenant", "node": "agent"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    lines = []
    for name, role in TOKENS.items():
        digest = hashlib.sha256(f"token-{name}".encode()).hexdigest()
        lines += ["[[principal]]", f'name = "{name}"', f'role = "{role}"',
                  f'token_sha256 = "{digest}"']  # fmt: skip
        if role == "tenant":
            lines.append(f'user = "{name}"')
    (folder / "principals.toml").write_text("\n".join(lines))
    settings = ServeSettings(
        folder=folder / "store", port=0, otlp_port=0, grpc_port=0,
        principals=folder / "principals.toml",
    )  # fmt: skip
    with Server(settings, clock_ns=clock) as server:
        store = server.store
        for name, rows in frames().items():
            owners = [("r1", "7", "alice", "lab", True), ("r2", "8", "bob", "lab", None)]
            store.submit({name: rows}, owners=owners).result()
        store.append(
            "jobs",
            pl.DataFrame({"cluster": "c", "raw_id": [7, 8], "job_id": ["7", "8"],
                          "user": ["alice", "bob"], "submit_ns": [NOW - HOUR] * 2,
                          "start_ns": [NOW - HOUR // 2, NOW - HOUR], "end_ns": [None, NOW - HOUR // 2],
                          "node_list": ["c[1-2]", "c1"]}),
        )  # fmt: skip
        for node in ("c1", "c3"):
            times = [NOW - 3 * HOUR // 4, NOW - HOUR // 4]
            store.append(
                "metrics",
                pl.DataFrame({"metric": "p", "labels": f'{{"host.name":"{node}"}}',
                              "time_ns": times, "value": [1.0, 2.0]}),
            )  # fmt: skip
        yield server


def get(server, who, path, **params):
    headers = {"authorization": f"Bearer token-{who}"} if who else {}
    return httpx.get(f"{server.url}/api/v1/{path}", params=params, headers=headers)


def found(answer, column):
    document = answer.json()
    at = [one["name"] for one in document["columns"]].index(column)
    return [row[at] for row in document["rows"]]


def test_nobody_and_agents_read_nothing(guarded):
    assert get(guarded, None, "tables/jobs").status_code == 401
    assert get(guarded, "mallory", "tables/jobs").status_code == 401
    assert get(guarded, "node", "tables/jobs").status_code == 403
    assert httpx.get(f"{guarded.url}/api/health").status_code == 200


def test_tenants_see_their_own(guarded):
    for who, run, job in (("alice", "r1", "7"), ("bob", "r2", "8")):
        assert found(get(guarded, who, "tables/jobs"), "job_id") == [job]
        assert found(get(guarded, who, "tables/steps"), "run") == [run]
        assert found(get(guarded, who, "tables/spans"), "run") == [run]
        assert found(get(guarded, who, "queries/runs"), "run") == [run]
        assert found(get(guarded, who, "queries/jobs"), "job_id") == [job]
    assert found(get(guarded, "alice", "events"), "body") == ["mine"]
    assert found(get(guarded, "bob", "events"), "body") == []
    assert found(get(guarded, "alice", "tables/spans"), "name") == ["secret layer"]
    for path in ("tables/probes", "tables/metrics"):
        assert get(guarded, "alice", path).json()["rows"] == []
    assert get(guarded, "alice", "statistics").status_code == 403
    assert get(guarded, "alice", "stream", tables="steps").status_code == 403


def test_operators_see_all_but_the_inside_without_consent(guarded):
    assert found(get(guarded, "op", "tables/jobs"), "job_id") == ["7", "8"]
    spans = get(guarded, "op", "tables/spans")
    assert dict(zip(found(spans, "run"), found(spans, "name"), strict=True)) == {
        "r1": "secret layer", "r2": "forward",
    }  # fmt: skip
    assert found(spans, "attributes") == ['{"a":1}', None]


def test_a_tenant_sees_metrics_of_its_jobs_nodes_while_they_ran(guarded):
    window = {"metric": "p", "start_ns": NOW - 2 * HOUR, "end_ns": NOW, "step_ns": 60 * 10**9}
    assert get(guarded, "alice", "metrics/range", **window).status_code == 403
    assert get(guarded, "alice", "metrics/range", **window, job="8").status_code == 400
    mine = get(guarded, "alice", "metrics/range", **window, job="7")
    assert found(mine, "value") == [2.0]
    assert found(mine, "labels") == ['{"host.name":"c1"}']
    latest = get(guarded, "bob", "metrics/latest", metric="p", job="8", at_ns=NOW)
    assert latest.json()["rows"] == []
    operator = get(guarded, "op", "metrics/range", **window)
    assert found(operator, "value") == [1.0, 2.0, 1.0, 2.0]


def test_only_senders_send(guarded):
    url = f"http://127.0.0.1:{guarded.otlp_port}/v1/traces"
    for who, status in ((None, 401), ("alice", 401), ("node", 200)):
        headers = PROTOBUF | ({"authorization": f"Bearer token-{who}"} if who else {})
        assert httpx.post(url, content=b"", headers=headers).status_code == status
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("run", pa.string())])):
        pass
    target = f"{guarded.url}/api/v1/tables/steps"
    for who, status in (("alice", 403), ("node", 200)):
        headers = {"authorization": f"Bearer token-{who}"}
        answer = httpx.post(target, content=sink.getvalue().to_pybytes(), headers=headers)
        assert answer.status_code == status
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{guarded.grpc_port}") as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(b"", metadata=[("authorization", "Bearer token-node")]) == b""


def test_wide_open_servers_refuse_to_start(tmp_path):
    with pytest.raises(ConfigurationError, match="principals"):
        Server(ServeSettings(folder=tmp_path, host="0.0.0.0"))
    with pytest.raises(ConfigurationError, match="certificate"):
        Server(ServeSettings(folder=tmp_path, client_authority=tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected"),
        ("[[principal]]\nname='a'", "needs name and role"),
        ("[[principal]]\nname='a'\nrole='king'\ntoken_sha256='0'", "role"),
        ("[[principal]]\nname='a'\nrole='operator'", "neither"),
        ("[[principal]]\nname='a'\nrole='operator'\ntoken_sha256='secret'", "64 hex"),
        (f"[[principal]]\nname='a'\nrole='tenant'\ntoken_sha256='{'0' * 64}'", "user or accounts"),
        ("not toml", "principals"),
    ],
)
def test_principals_files_are_checked(tmp_path, text, message):
    path = tmp_path / "principals.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Access.load(path)


def test_stopping_ends_streams_and_keeps_what_was_acknowledged(tmp_path):
    settings = ServeSettings(folder=tmp_path, port=0, otlp_port=0, grpc_port=None)
    server = Server(settings, clock_ns=clock)
    server.start()
    store = HttpStore(server.url)
    listener = store.subscribe(["steps"])
    store.append("steps", frames()["steps"])
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    stopper.join(15)
    assert not stopper.is_alive()
    listener.close()
    store.close()
    with open_store(tmp_path) as again:
        assert again.table("steps").height == 2


def test_the_api_keeps_to_its_description(server):
    """Schemathesis makes requests from the OpenAPI document and checks every answer against it."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    document = httpx.get(f"{server.url}/api/openapi.json").json()
    # A stream has no end to wait for; bodies of POST are Arrow, which it cannot make.
    document["paths"] = {
        path: {"get": item["get"]}
        for path, item in document["paths"].items()
        if path != "/api/v1/stream"
    }
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), database=None,
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case):
            response = case.call()
            assert response.status_code < 500 or response.status_code == 503, response.text
            assert response.status_code in {200, 400, 403, 404}, response.text
            # Meaning can be wrong where form is right: a metric or job nobody knows.
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        check()
        tried += 1
    assert tried > 25


def test_appended_garbage_is_refused(server):
    answer = httpx.post(f"{server.url}/api/v1/tables/steps", content=b"garbage")
    assert answer.status_code == 400
    assert "no Arrow stream" in orjson.loads(answer.content)["error"]
    with contextlib.suppress(httpx.HTTPError):
        assert httpx.post(f"{server.url}/api/v1/tables/none", content=b"").status_code == 404


@pytest.mark.parametrize("raw", [None, b"no PEM"])
def test_a_certificate_that_cannot_be_used_is_named(tmp_path, raw):
    pem = tmp_path / "server.pem"
    if raw is not None:
        pem.write_bytes(raw)
    settings = ServeSettings(
        folder=tmp_path / "store", port=0, otlp_port=0, grpc_port=None, certificate=pem, key=pem
    )
    with pytest.raises(ConfigurationError, match=r"server\.pem: the certificate.* cannot be used"):
        Server(settings).start()
