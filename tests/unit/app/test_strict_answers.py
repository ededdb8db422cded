"""Every answer of the server has a policy: pages their own, all else may do nothing."""

import httpx
import pytest

from kansoku.app.serve import Server, ServeSettings


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = ServeSettings(
        folder=tmp_path_factory.mktemp("strict"), port=0, otlp_port=None, grpc_port=None
    )
    with Server(settings) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "own"),
    [
        ("GET", "/cluster", True),
        ("GET", "/nowhere", True),
        ("GET", "/", False),
        ("POST", "/cluster", False),
        ("GET", "/settings?language=ja", False),
        ("GET", "/static/icon.svg", False),
        ("GET", "/api/v1/pages/cluster", False),
        ("GET", "/api/v1/pages/cluster?metric=nothing", False),
        ("GET", "/api/v1/tables/jobs", False),
        ("GET", "/live", False),
    ],
)
def test_every_answer_has_a_policy(server, method, path, own):
    answer = httpx.request(method, server.url + path)
    policy = answer.headers.get_list("content-security-policy")
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'; ")
    assert ("script-src 'self'" in policy[0]) is own
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
