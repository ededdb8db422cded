"""Fabric answers: the status contract, the views, the rows for the store."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from kansoku.app import fabric
from kansoku.catalog.metrics import metrics
from kansoku.errors import ConfigurationError, InputError, PlatformError
from kansoku.fabric.controller import Controller
from kansoku.fabric.edge.http import FabricService
from kansoku.fabric.edge.uplink import Line
from kansoku.fabric.messages import Register, RnicAddress
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import Report, Row, RowColumns, TraceRow
from kansoku.fabric.topology import Topology
from kansoku.model import table_schema

S = 1_000_000_000


@pytest.fixture
def controller():
    """Three RNICs under one ToR; the second is dead from the second window on."""
    topology = Topology(
        rnics=("a/0", "b/0", "c/0"), hosts=("a", "b", "c"), tors=("t0",), spines=(),
        rnic_host=np.arange(3, dtype=np.int32), rnic_tor=np.zeros(3, dtype=np.int32),
        parallel_paths=1, rail_optimised=False, tor_rail=np.array([-1], dtype=np.int32),
    )  # fmt: skip
    c = Controller(topology, Settings(), now_ns=0)
    for n, name in enumerate(topology.rnics):
        c.register(Register(name[0], 1, [RnicAddress(name, f"10.0.0.{n}", 100 + n)]), -S)
    return c


def window(c, number, dead=()):
    outcome = None
    for source, name in enumerate(c.topology.rnics):
        rows = []
        for target in range(3):
            if target == source:
                continue
            gone = 50 if {source, target} & set(dead) else 0
            times = (None,) * 5 if gone else (15_000, 40_000, 90_000, 120_000, 9_000)
            stamps = -1 if gone else 1
            rows.append(Row(target, 50000, 0, 50, gone, 0, 100 + target, *times, stamps))
        traces = [TraceRow(target, 50000, ["t0"], True) for target in range(3)]
        c.report(
            Report(name, 1, number * 20 * S, 20 * S, RowColumns.pack(rows), traces), number * 20 * S
        )
    (outcome,) = c.step(((number + 1) * 20 + 3) * S)
    return outcome


def test_before_the_first_window_it_is_unknown(controller):
    answer = fabric.status_json(controller)
    assert answer["schema"] == "kansoku.fabric.status/1"
    assert answer["verdict"] == "unknown"
    assert answer["window"] is None
    assert "No window" in fabric.status_view(answer).blocks[0].text


def test_status_contract(controller):
    window(controller, 0)
    assert fabric.status_json(controller)["verdict"] == "clear"
    window(controller, 1, dead={1})
    answer = fabric.status_json(controller)
    assert answer["verdict"] == "rnic"
    (anomaly,) = answer["anomalies"]
    assert {"kind", "subject", "loss_ratio", "votes", "evidence", "impact"} <= set(anomaly)
    assert (anomaly["kind"], anomaly["subject"], anomaly["impact"]) == ("rnic", "nic:b/0", "P2")
    assert anomaly["loss_ratio"] == 1.0
    assert anomaly["votes"] == 200
    assert answer["sla"]["cluster"]["drop_ratio"] == pytest.approx(200 / 300)
    assert answer["sla"]["service"] is None
    json.dumps(answer)
    text = fabric.status_view(answer).blocks[0].text
    assert text == "It is the rnic: nic:b/0 (100.0% of the probes over it lost, P2)"


def test_a_clean_window_alone_closes_nothing(controller):
    window(controller, 0)
    window(controller, 1, dead={1})
    window(controller, 2)
    answer = fabric.status_json(controller)
    assert answer["verdict"] == "rnic"
    assert "waiting for another" in answer["reason"]
    window(controller, 3)
    answer = fabric.status_json(controller)
    assert answer["verdict"] == "clear"
    assert answer["reason"].startswith("network cleared")
    assert [event["state"] for event in answer["events"]] == ["open", "closed"]
    assert [w["verdict"] for w in answer["history"]] == ["clear", "rnic", "clear", "clear"]


def test_matrix_and_its_drill_down(controller):
    window(controller, 0)
    answer = fabric.matrix_json(controller, {"by": "rnic"})
    assert answer["loss_ratio"][0][1] == 0.0
    assert answer["loss_ratio"][0][0] is None
    assert answer["rtt_us"][0][1] == 15.0
    pair = fabric.matrix_json(controller, {"by": "rnic", "source": "a/0", "target": "c/0"})["pair"]
    (row,) = pair["tuples"]
    assert (row["path"], row["ack_path"], row["source_port"]) == (["t0"], ["t0"], 50000)
    assert fabric.matrix_view(answer).blocks[0].values[0][1] == 0.0
    with pytest.raises(InputError):
        fabric.matrix_json(controller, {"by": "rack"})
    with pytest.raises(InputError):
        fabric.matrix_json(controller, {"source": "x", "target": "t0"})


def test_rows_for_the_store(controller):
    window(controller, 0)
    tables = fabric.outcome_tables(controller, window(controller, 1, dead={1}))
    for name, frame in tables.items():
        assert dict(frame.schema) == table_schema(name)
    probes = tables["probes"]
    assert probes["lost"].sum() == 200
    assert set(probes["path"]) == {"t0"}
    assert set(probes["outcome"]) == {"ok", "lost"}
    assert probes["stamp_source"].to_list().count(None) == 4
    (finding,) = tables["findings"].to_dicts()
    assert (finding["subject"], finding["domain"], finding["verdict"]) == (
        "nic:b/0", "network", "found",
    )  # fmt: skip
    # The subject says what it is: "rnic nic:b/0" would say it twice.
    assert finding["sentence"] == "nic:b/0 at fault: 100.0% of probes lost (P2)"
    assert finding["onset_ns"] == 20 * S
    anomalies = {
        json.loads(row["labels"])["kansoku.kind"]: row["value"]
        for row in tables["metrics"].to_dicts()
        if row["metric"] == "kansoku.fabric.anomalies"
    }
    assert {row["metric"] for row in tables["metrics"].to_dicts()} <= set(metrics())
    assert anomalies == {"rnic": 1, "link": 0, "switch": 0, "host": 0}


def test_settings_file(tmp_path):
    path = tmp_path / "fabric.toml"
    path.write_text('[settings]\nwindow_s = 2\n[switches]\nspine0 = ["10.0.0.1", "10.0.0.5"]\n')
    settings, switches = fabric.load_settings(path)
    assert settings.window_s == 2
    assert switches == {"10.0.0.1": "spine0", "10.0.0.5": "spine0"}
    path.write_text("[settings]\nwindow = 2\n")
    with pytest.raises(ConfigurationError, match="window_s"):
        fabric.load_settings(path)


def test_addresses_and_refusals(controller):
    assert fabric.Address.parse("unix:/run/k.sock").path == "/run/k.sock"
    assert fabric.Address.parse("[::1]:80") == fabric.Address(host="::1", port=80)
    with pytest.raises(InputError):
        fabric.Address.parse("localhost")
    with pytest.raises(PlatformError, match="token"):
        fabric.serve_controller(None, fabric.Address(host="0.0.0.0", port=0))
    with pytest.raises(InputError, match="family"):
        fabric.agent("n", [("a", "10.0.0.1"), ("b", "fd00::1")])
    for address in ("notaurl", "http://", "ftp://x", "unix:", ""):
        with pytest.raises(InputError, match="is not http://HOST:PORT"):
            fabric.status(address)
    with pytest.raises(PlatformError, match="no fabric controller"):
        fabric.status("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("settings = 3", "settings is no table"),
        ("[settings]\nwindow_s = 'x'", "window_s = 'x' must be a number"),
        ("[switch]\nspine0 = ['1.1.1.1']", "unknown section switch"),
        ("[switches]\nspine0 = '1.1.1.1'", "spine0: '1.1.1.1' is no list"),
        ("[switches]\nspine0 = ['one']", "'one' is no address"),
        ("[switches]\na = ['1.1.1.1']\nb = ['1.1.1.1']", "both a and b"),
    ],
)
def test_a_settings_file_that_makes_no_sense_is_refused(tmp_path, text, says):
    path = tmp_path / "fabric.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        fabric.load_settings(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["unix:", "127.0.0.1:65536", "127.0.0.1:²", "foo"])
def test_addresses_that_nobody_can_listen_on(text):
    with pytest.raises(InputError):
        fabric.Address.parse(text)


def listen(controller, text, **options):
    service = FabricService(controller, clock=lambda: 0, status=lambda _: {}, matrix=lambda *_: {})
    fabric.serve_controller(service, fabric.Address.parse(text), **options)


def test_only_a_socket_that_nobody_listens_on_gives_way(controller, tmp_path):
    precious = tmp_path / "notes.txt"
    precious.write_text("mine")
    with pytest.raises(PlatformError, match=r"notes\.txt: it is there already and no socket"):
        listen(controller, f"unix:{precious}")
    assert precious.read_text() == "mine"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "c.sock"))
        other.listen()
        with pytest.raises(PlatformError, match="another process listens there"):
            listen(controller, f"unix:{tmp_path / 'c.sock'}")


@pytest.mark.parametrize(
    "text", ["unix:{}/c.sock", pytest.param("[::1]:0", id="IPv6"), "127.0.0.1:0"]
)
def test_it_listens_before_it_says_so(controller, tmp_path, monkeypatch, text):
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as left:  # of a controller that was killed
        left.bind(str(path))
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: said.append(sockets[0].family))
    said = []
    listen(controller, text.format(tmp_path), on_start=lambda: said.append("listens"))
    family = {"u": socket.AF_UNIX, "[": socket.AF_INET6, "1": socket.AF_INET}[text[0]]
    assert said == ["listens", family]


def test_an_empty_token_opens_nothing(controller):
    with pytest.raises(PlatformError, match="without a token"):
        listen(controller, "0.0.0.0:0", token="")


@pytest.mark.parametrize(
    ("rnics", "port", "says"),
    [
        ([("nic0", "foo")], None, "'foo' is not an IP address"),
        ([("nic0", "127.0.0.1"), ("nic0", "127.0.0.2")], None, "nic0 is given twice"),
        ([("nic0", "127.0.0.1")], 70_000, "70000 is no port"),
        ([("nic0", "127.0.0.1")], -1, "-1 is no port"),
        ([("nic0", "127.0.0.1")], 4791, "4791 is no port"),
    ],
)
def test_an_agent_is_not_started_with_nonsense(rnics, port, says):
    with pytest.raises(InputError, match=says):
        fabric.agent("a", rnics, port=port)


@pytest.mark.parametrize("url", ["http://c:abc", "http://c:99999", "http://", "unix:", "http:///x"])
def test_controller_addresses_are_checked_before_the_start(url):
    with pytest.raises(ConfigurationError, match="is not http://HOST:PORT"):
        Line(url)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": "this controller needs its token"}', r"needs its token \(set KANSOKU_"),
        (400, b'{"error": "source and target"}', r"/fabric/status: refused \(400\): source"),
        (200, b"<html>hello</html>", "not as a fabric controller does"),
        (200, b'{"status": "ok"}', "not as a fabric controller does"),
        (200, b"[1]", "not as a fabric controller does"),
        (404, b"Not Found", "answered 404, and not as"),
        (500, b"\xff\x00", "answered 500, and not as"),
    ],
)
def test_another_server_and_a_refusal_are_one_clear_line(status, body, says):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(PlatformError, match=says):
            fabric.status(f"http://127.0.0.1:{server.server_port}")


@pytest.mark.parametrize("token", ["ün", "a\n", "a\tb"])
def test_a_token_that_no_request_can_carry(monkeypatch, token):
    monkeypatch.setenv("KANSOKU_FABRIC_TOKEN", token)
    with pytest.raises(ConfigurationError, match="KANSOKU_FABRIC_TOKEN: the token has characters"):
        fabric.status("http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        fabric.agent("a", [("nic0", "127.0.0.99")], port=47999)
