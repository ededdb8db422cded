"""The fabric controller in the server: who may do what there, and when it is there at all."""

import hashlib
from dataclasses import replace

import httpx
import msgspec
import polars as pl
import pytest

from kansoku.app.serve import Server, ServeSettings
from kansoku.app.serve.fabric import Inherited, has_fabric
from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError
from kansoku.fabric.messages import Register, RnicAddress
from kansoku.model import table_schema

PACK = {"content-type": "application/msgpack"}
HELLO = msgspec.msgpack.encode(Register("c001", 1, [RnicAddress("c001/mlx5_0", "10.0.0.1", 5)]))


def settings(folder, **more):
    return ServeSettings(folder=folder, port=0, otlp_port=None, grpc_port=None, **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    lines = []
    for role, more in (("operator", ""), ("tenant", 'user = "alice"'), ("agent", "")):
        digest = hashlib.sha256(role.encode()).hexdigest()
        lines += ["[[principal]]", f'name = "{role}"', f'role = "{role}"', more,
                  f'token_sha256 = "{digest}"']  # fmt: skip
    (folder / "principals.toml").write_text("\n".join(lines))
    given = settings(
        folder / "store",
        principals=folder / "principals.toml",
        cluster=load_cluster("sakuraone-h100"),
    )
    with Server(given) as server:
        yield server


def bearer(who):
    return {"authorization": f"Bearer {who}"} if who else {}


@pytest.mark.parametrize(
    ("who", "status"), [(None, 401), ("guess", 401), ("tenant", 403), ("agent", 200),
                        ("operator", 200)],
)  # fmt: skip
def test_who_may_send_registers(server, who, status):
    answer = httpx.post(f"{server.url}/fabric/register", content=HELLO, headers=PACK | bearer(who))
    assert answer.status_code == status
    listed = httpx.get(f"{server.url}/fabric/pinglist?rnic=c001/mlx5_0&qpn=5", headers=bearer(who))
    assert listed.status_code == status


@pytest.mark.parametrize(
    ("who", "status"), [(None, 401), ("tenant", 403), ("agent", 403), ("operator", 200)]
)
def test_who_sees_the_machine_sees_the_verdict(server, who, status):
    for path in ("/fabric/status", "/fabric/matrix"):
        assert httpx.get(server.url + path, headers=bearer(who)).status_code == status


def test_another_sites_page_cannot_make_a_browser_send(server):
    """Its cookie counts for reading only, and a form cannot say what type agents send."""
    cookie = {"cookie": "kansoku_token=operator"}
    assert httpx.get(f"{server.url}/fabric/status", headers=cookie).status_code == 200
    answer = httpx.post(f"{server.url}/fabric/register", content=HELLO, headers=PACK | cookie)
    assert answer.status_code == 401
    plain = {"content-type": "text/plain"} | bearer("operator")
    answer = httpx.post(f"{server.url}/fabric/register", content=HELLO, headers=plain)
    assert answer.status_code == 415


def test_without_a_fabric_there_is_no_controller(tmp_path):
    with Server(settings(tmp_path / "store")) as plain:
        assert plain.statistics()["fabric"] is None
        answer = httpx.post(f"{plain.url}/fabric/register", content=HELLO, headers=PACK)
        assert answer.status_code in {404, 405}
    with pytest.raises(ConfigurationError, match="without a cluster file"):
        Server(settings(tmp_path / "other", fabric=tmp_path / "fabric.toml"))


def finding(subject, verdict, source="fabric"):
    return {"id": "fabric.link", "subject": subject, "verdict": verdict, "source": source,
            "severity": "critical", "sentence": "x", "onset_ns": 5, "time_ns": 9}  # fmt: skip


def test_what_an_earlier_controller_left_open_is_closed_after_three_clear_windows():
    """Its successor has never seen the fault: nobody else would say that it is over."""
    rows = [finding("link:a-b", "found"), finding("link:c-d", "none"),
            finding("node:n", "found", source="watch")]  # fmt: skip
    left = Inherited(pl.DataFrame(rows, schema=table_schema("findings")))
    for verdict in ("clear", "clear", "link", "clear", "unknown", "clear", "clear"):
        assert left.judge(verdict, 100).is_empty()
    (closed,) = left.judge("clear", 200).to_dicts()
    assert (closed["id"], closed["subject"], closed["verdict"]) == (
        "fabric.link", "link:a-b", "none",
    )  # fmt: skip
    assert (closed["time_ns"], closed["onset_ns"], closed["severity"]) == (200, 5, "info")
    assert "link:a-b is not at fault any more" in closed["sentence"]
    assert left.judge("clear", 300).is_empty()


def test_switches_alone_are_no_fabric_to_watch():
    cluster = load_cluster("sakuraone-h100")
    assert has_fabric(cluster)
    bare = [replace(node, kind=replace(node.kind, nics=())) for node in cluster.nodes]
    assert not has_fabric(replace(cluster, nodes=tuple(bare)))
