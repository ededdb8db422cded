"""The controller's routes: who may ask, what is refused."""

import msgspec
import pytest
from starlette.testclient import TestClient

from kansoku.app.fabric import controller_app, make_service
from kansoku.fabric.messages import Pinglist, Register, RnicAddress, ServiceTuple
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import Report, RowColumns, TraceRow

PACK = {"content-type": "application/msgpack"}


@pytest.fixture
def client():
    service = make_service(
        "sakuraone-h100", settings=Settings(), clock=lambda: 1_000_000_000_000, token="secret"
    )
    with TestClient(
        controller_app(service), headers={"authorization": "Bearer secret", **PACK}
    ) as made:
        made.service = service
        yield made


def post(client, path, body, **options):
    return client.post(path, content=msgspec.msgpack.encode(body), **options)


def register(client, name="c001/mlx5_0", qpn=5):
    return post(
        client, "/fabric/register", Register("c001", 1, [RnicAddress(name, "10.0.0.1", qpn)])
    )


def test_without_the_token_nothing_is_said(client):
    wrong = {"authorization": "Bearer guess"}
    for path in ("/fabric/status", "/fabric/matrix", "/fabric/pinglist"):
        assert client.get(path, headers=wrong).status_code == 401
    for path in ("/fabric/register", "/fabric/leave", "/fabric/report"):
        assert post(client, path, [], headers=wrong).status_code == 401
    assert client.delete("/fabric/service/1", headers=wrong).status_code == 401


def test_register_then_fetch_then_not_modified(client):
    query = "/fabric/pinglist?rnic=c001/mlx5_0&qpn=5"
    assert client.get(query).status_code == 409
    assert register(client).status_code == 200
    assert register(client, "c002/mlx5_0", 6).status_code == 200
    answer = client.get(query)
    pinglist = msgspec.msgpack.decode(answer.content, type=Pinglist)
    targets = {entry.target: entry for entry in pinglist.probes.entries()}
    (entry,) = targets.values()  # of 800 RNICs only the other one is there
    assert (entry.address, entry.qpn) == ("10.0.0.1", 6)
    assert client.get(f"{query}&version={pinglist.version}").status_code == 304
    assert client.get("/fabric/pinglist?rnic=c001/mlx5_0&qpn=4").status_code == 409


def test_nonsense_is_refused_with_its_reason(client):
    assert register(client, "stranger/eth0").status_code == 400
    assert client.post("/fabric/report", content=b"\xc1").status_code == 400
    assert post(client, "/fabric/report", [{"rnic": 5}]).status_code == 400
    assert client.get("/fabric/matrix?by=rack").status_code == 400
    torn = Report("c001/mlx5_0", 1, 0, 20, RowColumns([b"abc"]))
    assert post(client, "/fabric/report", [torn]).status_code == 200
    assert client.service.refused == 1


def test_a_service_can_be_told_in_json_too(client):
    tuples = [ServiceTuple("c001/mlx5_0", "c051/mlx5_0", 50000)]
    answer = client.put(
        "/fabric/service/42", content=msgspec.json.encode(tuples),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert msgspec.msgpack.decode(answer.content) == {"tuples": 1}
    assert client.get("/fabric/status").json()["fabric"]["jobs"] == {"42": 1}
    client.delete("/fabric/service/42")
    assert client.get("/fabric/status").json()["fabric"]["jobs"] == {}


@pytest.mark.parametrize(("lease", "status"), [("30", 200), ("0", 400), ("-1", 400), ("nan", 400),
                                               ("1e9", 400), ("soon", 400)])  # fmt: skip
def test_a_lease_is_checked(client, lease, status):
    answer = client.put(f"/fabric/service/42?lease_s={lease}", content=msgspec.msgpack.encode([]))
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"node":"x","x":' + b"[" * 100_000, "application/json"),
        (b"\x83\xa4node\xa1x\xa1y" + b"\x91" * 100_000, "application/msgpack"),
    ],
)
def test_endless_nesting_is_refused(client, body, kind):
    answer = client.post("/fabric/register", content=body, headers={"content-type": kind})
    assert answer.status_code == 400


def test_what_an_agent_says_of_itself_is_small(client):
    names = b"\xdd" + (2 << 20).to_bytes(4, "big") + b"\xa0" * (2 << 20)
    assert client.post("/fabric/leave", content=names).status_code == 413
    assert client.post("/fabric/register", content=names).status_code == 413


@pytest.mark.parametrize(
    "wrong",
    [
        {"rnic": "x" * 1000},
        {"rows": RowColumns([b""] * 15)},
        {"rtt": {"cluster": dict.fromkeys(range(2000), 1)}},
        {"agent": {str(n): 1.0 for n in range(100)}},
        {"traces": [TraceRow(1, 50000, [None] * 65, False)]},
        {"traces": [TraceRow(1, 50000, [], False)] * 5001},
        {"traces": [TraceRow(1, 50000, ["x" * 1000], True)]},
    ],
)
def test_no_part_of_a_report_is_endless(client, wrong):
    good = {"rnic": "c001/mlx5_0", "incarnation": 1, "window_start_ns": 0, "window_ns": 20,
            "rows": RowColumns([b""] * 14)}  # fmt: skip
    assert post(client, "/fabric/report", [good]).status_code == 200
    assert post(client, "/fabric/report", [good | wrong]).status_code == 400
