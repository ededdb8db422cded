"""Dashboards as JSON: whole, of the right schema, every name in a query known."""

import json
import re

import promql_parser
import pytest
from grafana_foundation_sdk.models import dashboard as models

from kansoku.catalog.metrics import metrics, prometheus_name
from kansoku.deploy import alert_rules
from kansoku.deploy.dashboards import dashboards
from kansoku.errors import DependencyError
from kansoku.model import table_schema

BOARDS = dashboards()
WANTED = {
    "cluster", "job", "node", "gpu", "nic", "storage", "slurm", "fabric", "bursts", "incidents",
    "telemetry",
}  # fmt: skip
# Of other programs: Slurm's maps come from our agent, these from the gateway and from vmalert.
FOREIGN = re.compile(r"ALERTS|otelcol_.*")
SHARED = {
    "host_name",
    "service_name",
    "__name__",
    "alertname",
    "alertstate",
    "severity",
    "exporter",
}


def targets():
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield name, panel["title"], target


def promql_texts():
    yield from (
        (f"{name}: {title}", re.sub(r"\$__\w+", "5m", target["expr"]))
        for name, title, target in targets()
        if target["datasource"]["type"] == "prometheus"
    )
    for rules in alert_rules().values():
        yield from ((rule.name, rule.expression) for rule in rules)


PROMQL = dict(promql_texts())


def test_every_view_has_its_dashboard():
    assert set(BOARDS) == {f"kansoku-{name}" for name in WANTED}
    for name, board in BOARDS.items():
        assert board["uid"] == name
        assert board["schemaVersion"] == 41  # Grafana 11.6
        assert not board["editable"]
    tags = {tag for board in BOARDS.values() for tag in board["tags"]}
    views = {
        f"{who} {what}" for who in ("developer", "operator") for what in ("workload", "resource")
    }
    assert tags == views | {"kansoku"}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_placed_apart_and_named_once(name):
    panels = BOARDS[name]["panels"]
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles))
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        }  # fmt: skip
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & own, panel["title"]
        cells |= own


@pytest.mark.parametrize("name", BOARDS)
def test_json_is_what_the_schema_reads(name):
    read = models.Dashboard.from_json(json.loads(json.dumps(BOARDS[name])))
    assert read.uid == name


@pytest.mark.parametrize("where", PROMQL)
def test_promql_parses_and_names_only_known_metrics_and_labels(where):
    text = PROMQL[where]
    promql_parser.parse(text)
    known = {prometheus_name(name): metric for name, metric in metrics().items()}
    labels = {a.replace(".", "_") for metric in metrics().values() for a in metric.attributes}
    labels |= SHARED
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", text):
        used = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))
        if FOREIGN.fullmatch(name):
            continue
        assert name in known, name
        own = {a.replace(".", "_") for a in known[name].attributes} | {"host_name"}
        assert used <= own, (name, used - own)
    for group in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", text):
        assert set(filter(None, re.split(r",\s*", group))) <= labels


def test_every_variable_in_a_query_is_declared():
    for name, _, target in targets():
        board = BOARDS[name]
        declared = {v["name"] for v in board.get("templating", {}).get("list", [])}
        text = json.dumps(target)
        used = set(re.findall(r"\$([a-z]\w*)", text))
        assert used <= declared, (name, used - declared)


def test_data_sources_are_those_that_are_provisioned():
    uids = {target["datasource"]["uid"] for _, _, target in targets()}
    assert uids == {"kansoku-metrics", "kansoku-logs", "kansoku-traces", "kansoku-profiles"}


def test_another_schema_of_the_sdk_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1769699998!10.1.0")
    with pytest.raises(DependencyError, match=r"another schema than Grafana 11\.6"):
        dashboards()


def test_the_job_shows_all_that_steps_used():
    text = json.dumps(dashboards()["kansoku-job"])
    for column in ("energy_j", "nic_bytes", "nvlink_bytes", "sm_activity", "memory_activity"):
        assert column in table_schema("steps")
        # A curve by rank, and a column of the ranks' table.
        assert text.count(f"kansoku.{column}") == 2, column
