"""Every query of every dashboard, asked of real servers that our agent filled."""

import re

import pytest
from tests.labs.observed_fleet import observe, promql
from tests.labs.victoria import prometheus, victoria_metrics

from kansoku.deploy.dashboards import dashboards

pytestmark = pytest.mark.real
VARIABLES = {
    "$__rate_interval": "1m", "$__range": "5m", "$__interval": "15s", "$node": ".*", "$gpu": ".*",
    "$job": "417", "$interface": ".*", "$filesystem": ".*", "$scope": ".*", "$switch": ".*",
}  # fmt: skip


def filled(text, **more):
    for name, value in ({f"${k}": v for k, v in more.items()} | VARIABLES).items():
        text = re.sub(re.escape(name) + r"(?![a-zA-Z_])", value, text)
    assert "$" not in text.replace("$.", ""), text
    return text


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    with victoria_metrics(folder / "vm") as vm, prometheus(folder / "prometheus") as prom:
        found = observe(folder, {"victoria-metrics": vm, "prometheus": prom})
        yield found
        found.gateway.close()


def queries():
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                if target["datasource"]["type"] == "prometheus":
                    yield name, panel["title"], target["expr"]


def test_every_promql_query_has_an_answer(fleet):
    empty = {}
    for server_name, server in fleet.servers.items():
        for name, title, text in queries():
            if not promql(server, filled(text), fleet.windows["after"]["end_ns"]):
                empty.setdefault((name, title, text), []).append(server_name)
    assert empty == {}
