"""Every query of every dashboard, asked of real servers that our agent filled.

VictoriaMetrics and Prometheus are Debian's; the fault stands on another device in the second
window, and the panels' answers go with it. LogsQL is only read at wire level: the entries are
those of our exporter, the server is tests/labs/victoria_logs.py.
"""

import json
import re
import subprocess
from datetime import UTC, datetime

import polars as pl
import promql_parser
import pytest
from tests.labs.observed_fleet import observe, promql
from tests.labs.victoria import flush, free_port, prometheus, victoria_metrics
from tests.labs.victoria_logs import logsql

from kansoku.app.deploy import deploy_files
from kansoku.app.store import open_fleet, open_store
from kansoku.catalog.cluster import load_cluster
from kansoku.deploy.dashboards import dashboards

pytestmark = pytest.mark.real
VARIABLES = {
    "$__rate_interval": "2m", "$__range": "5m", "$__interval": "30s", "$node": ".*", "$gpu": ".*",
    "$job": "417", "$interface": ".*", "$filesystem": ".*", "$scope": ".*", "$switch": ".*",
    "$run": "slurm-.*", "$domain": ".*",
}  # fmt: skip
JOB_OF = {"c001": "417", "c002": "418"}
BOARDS = dashboards()


def filled(text, **more):
    for name, value in (VARIABLES | {f"${k}": v for k, v in more.items()}).items():
        text = re.sub(re.escape(name) + r"(?![a-zA-Z_])", value, text)
    return text


def stamp(at_ns):
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fire_alerts(server, folder, windows):
    """Let Debian's vmalert evaluate the rendered rules over both windows and write what fires."""
    _, files = deploy_files(load_cluster("sakuraone-h100"))
    rules = folder / "kansoku.rules.yaml"
    rules.write_text(next(f.text for f in files if f.path == "alerts/kansoku.rules.yaml"))
    for window in windows.values():
        end = window["end_ns"]
        done = subprocess.run(
            ["vmalert", f"-rule={rules}", f"-datasource.url={server.url}", "-replay.rulesDelay=0s",
             "-datasource.queryStep=30s",
             f"-remoteWrite.url={server.url}", "-remoteWrite.flushInterval=100ms",
             f"-httpListenAddr=127.0.0.1:{free_port()}", "-replay.disableProgressBar",
             f"-replay.timeFrom={stamp(end - 300 * 10**9)}", f"-replay.timeTo={stamp(end)}"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    flush(server)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    with victoria_metrics(folder / "vm") as vm, prometheus(folder / "prometheus") as prom:
        found = observe(folder, {"victoria-metrics": vm, "prometheus": prom})
        fire_alerts(vm, folder, found.windows)
        yield found
        found.gateway.close()


def targets(kind):
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                if target["datasource"]["type"] == kind:
                    yield name, panel["title"], target


def selectors(node):
    """Yield the vector selectors of a parsed query."""
    match type(node).__name__:
        case "VectorSelector":
            yield node
        case "MatrixSelector":
            yield node.vector_selector
        case "BinaryExpr":
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case "Call":
            for one in node.args:
                yield from selectors(one)
        case "AggregateExpr" | "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from selectors(node.expr)


def test_every_promql_query_has_an_answer(fleet):
    """On both servers; what vmalert wrote is in VictoriaMetrics alone."""
    empty = {}
    for server_name, server in fleet.servers.items():
        for name, title, target in targets("prometheus"):
            found = promql(server, filled(target["expr"]), fleet.windows["after"]["end_ns"])
            if not found:
                empty.setdefault((name, title, target["expr"]), []).append(server_name)
    assert empty == {}


def test_no_query_hides_a_wrong_name_behind_a_zero(fleet):
    """``or vector(0)`` answers always, so each selector in a query is asked alone too."""
    server, end = fleet.servers["victoria-metrics"], fleet.windows["after"]["end_ns"]
    idle = '{slurm_state="idle"}'  # no node is idle here: both have a job
    missing = []
    for name, title, target in targets("prometheus"):
        for one in selectors(promql_parser.parse(filled(target["expr"]))):
            text = str(one).removesuffix(idle) if str(one).endswith(idle) else str(one)
            if not promql(server, f"count({text.replace(' offset 1m', '')})", end):
                missing.append((name, title, text))
    assert missing == []


def test_legends_name_labels_that_the_answer_has(fleet):
    wrong = []
    for name, title, target in targets("prometheus"):
        wanted = set(re.findall(r"{{\s*([\w.]+)\s*}}", target.get("legendFormat", "")))
        found = promql(
            fleet.servers["victoria-metrics"], filled(target["expr"]),
            fleet.windows["after"]["end_ns"],
        )  # fmt: skip
        labels = [set(one) for one, _ in found if one or "vector(0)" not in target["expr"]]
        wrong += [(name, title, wanted - have) for have in labels[:1] if wanted - have]
    assert wrong == []


def test_variables_offer_values(fleet):
    server, end = fleet.servers["victoria-metrics"], fleet.windows["after"]["end_ns"]
    offered = {}
    for name, board in BOARDS.items():
        for variable in board.get("templating", {}).get("list", []):
            if variable["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((.+), (\w+)\)", variable["query"]
                ).groups()
                found = promql(server, f"count by ({label}) ({filled(metric)})", end)
                offered[name, variable["name"]] = {one.get(label) for one, _ in found}
    assert offered["kansoku-job", "job"] == {"417", "418"}
    assert offered["kansoku-node", "node"] == {"c001", "c002", "login1"}
    assert offered["kansoku-gpu", "gpu"] == {f"gpu{i}" for i in range(8)}
    assert offered["kansoku-nic", "interface"] == {f"ens{i}f0" for i in range(5)}
    assert offered["kansoku-fabric", "switch"] == {"leaf0", "leaf1"}
    assert all(values - {None} for values in offered.values())


def planted(fault):
    """(dashboard, panel, query, labels, value): by hand from tests/labs/fleet_feed.py."""
    node, gpu, job = fault["node"], f"gpu{fault['gpu']}", JOB_OF[fault["node"]]
    device = {"host_name": node, "hw_name": gpu}
    nic = {"host_name": node, "network_interface_name": f"ens{fault['nic']}f0"}
    held = {"417": 8, "418": 4}[job]
    cluster, network = "kansoku-cluster", "kansoku-nic"
    return [
        (cluster, "GPUs", 0, {}, 16),
        (cluster, "GPUs held by jobs", 0, {}, 12),
        (cluster, "GPU power", 0, {}, 15 * 500 + 90),
        (cluster, "GPU energy", 0, {}, 16 * 500 * 300),
        (cluster, "GPU utilisation", 0, {}, (15 * 0.98 + 0.03) / 16),
        (cluster, "GPU power, by the job that holds the GPU", 0, {**device, "slurm_job_id": job}, 90),
        (cluster, "GPU power, GPUs that no job holds", 0, {"host_name": "c002", "hw_name": "gpu7"}, 500),
        (cluster, "Jobs on nodes: GPUs held", 0, {"host_name": node, "slurm_job_id": job}, held),
        (cluster, "Power by node", 0, {"host_name": node}, 7 * 500 + 90),
        (cluster, "Nodes not in service", 0, {}, 1),
        (cluster, "Through the fabric's NICs", 0, {"network_io_direction": "transmit"}, 1e11),
        (cluster, "To and from Lustre", 0, {"disk_io_direction": "read"}, 4e9),
        (cluster, "Utilisation of held GPUs by job", 0, {"slurm_job_id": job},
         (0.98 * (held - 1) + 0.03) / held),
        ("kansoku-job", "GPU power", 0, device, 90),
        ("kansoku-job", "Power", 0, {}, 500 * (held - 1) + 90),
        ("kansoku-job", "GPUs below 10 % utilisation", 0, {}, 1),
        ("kansoku-job", "Clocks held down", 0, device, 1 / 3),
        ("kansoku-job", "Sent by the job's nodes", 0, {"host_name": node, "hw_name": "mlx5_0"}, 1e10),
        ("kansoku-job", "Waiting for I/O on the job's nodes", 0, {"host_name": node}, 0.5),
        ("kansoku-gpu", "Power by GPU", 0, device, 90),
        ("kansoku-gpu", "Power from the energy counter", 0, device, 500),
        ("kansoku-gpu", "Clocks held down, by reason", 0, {**device, "kansoku_gpu_reason": "thermal"}, 1 / 3),
        ("kansoku-gpu", "Errors", 0, {**device, "error_type": "ecc_uncorrected"}, 4),
        ("kansoku-gpu", "NVLink", 0, {**device, "network_io_direction": "transmit"}, 1000 * 1024),
        (network, "Longest paused by PFC", 0, {}, 0.2),
        (network, "Paused by PFC", 0, {**nic, "kansoku_priority": "3", "network_io_direction": "receive"}, 0.2),
        (network, "PFC pause frames by priority", 0, {**nic, "kansoku_priority": "3", "network_io_direction": "receive"}, 2000),
        (network, "Discards and why", 0, {**nic, "kansoku_cause": "out_of_buffer"}, 40),
        (network, "Loss and order", 0, {"host_name": node, "kansoku_rdma_device": f"mlx5_{fault['nic']}", "kansoku_rdma_counter": "out_of_sequence"}, 40),
        (network, "Share of line rate", 0, {"host_name": node, "hw_name": "mlx5_2", "network_io_direction": "transmit"}, 0.2),
        (network, "Bytes by priority", 0, {"kansoku_priority": "3", "network_io_direction": "receive"}, 1e10),
        ("kansoku-storage", "Targets not connected", 0, {}, 1),
        ("kansoku-storage", "Lustre targets connected", 0, {"kansoku_target": f"scratch-OST{fault['ost']:04x}"}, 1),
        ("kansoku-storage", "Lustre: mean time of an operation", 0, {"host_name": node, "kansoku_operation": "open"}, 2e-3),
        ("kansoku-node", "Tasks that waited (PSI)", 2, {"host_name": node, "kansoku_pressure": "full"}, 0.5),
        ("kansoku-node", "CPU time", 0, {"cpu_mode": "user"}, 2 * 0.4),
        ("kansoku-slurm", "GPUs held by account", 0, {"slurm_account": "vision"}, 4),
        ("kansoku-slurm", "Which nodes are not in service", 0, {"slurm_node_name": node, "slurm_state": "drain"}, 1),
        ("kansoku-fabric", "Lost", 0, {}, fault["drop"]),
        ("kansoku-fabric", "Switch ports: dropped and in error", 0, {"kansoku_switch": fault["leaf"], "network_interface_name": f"Ethernet{fault['port'] * 8}"}, 3),
        ("kansoku-fabric", "Queues: ECN marks", 0, {"kansoku_switch": "leaf1", "network_interface_name": "Ethernet0", "kansoku_queue": "3"}, 7),
        ("kansoku-telemetry", "Nodes reporting", 0, {}, 3),
        ("kansoku-telemetry", "Memory of agents", 0, {"host_name": "c001"}, 16384 * 4096),
        ("kansoku-bursts", "Beside them: paused by PFC", 0, nic, 0.2),
    ]  # fmt: skip


def expression(name, title, number):
    found = [
        target["expr"]
        for panel in BOARDS[name]["panels"]
        if panel["title"] == title
        for target in panel["targets"]
    ]
    return found[number]


@pytest.mark.parametrize("server_name", ["victoria-metrics", "prometheus"])
@pytest.mark.parametrize("window", ["before", "after"])
def test_planted_values_appear_and_move_with_the_fault(fleet, server_name, window):
    server, fault = fleet.servers[server_name], fleet.windows[window]
    wrong = []
    for name, title, number, labels, value in planted(fault):
        text = filled(expression(name, title, number), job=JOB_OF[fault["node"]])
        answer = promql(server, text, fault["end_ns"])
        found = [v for have, v in answer if labels.items() <= have.items()]
        if found != [pytest.approx(value, rel=0.02)]:
            wrong.append((name, title, labels, value, found or answer[:4]))
    assert wrong == []


@pytest.mark.parametrize("window", ["before", "after"])
def test_a_healthy_device_does_not_show_the_fault(fleet, window):
    """The other window's device is healthy in this one."""
    here = fleet.windows[window]
    there = fleet.windows["after" if window == "before" else "before"]
    server = fleet.servers["victoria-metrics"]
    for title, labels, value in (
        ("Power by GPU", {"host_name": there["node"], "hw_name": f"gpu{there['gpu']}"}, 500),
        ("Clocks held down, by reason",
         {"host_name": there["node"], "hw_name": f"gpu{there['gpu']}", "kansoku_gpu_reason": "thermal"}, 0),
    ):  # fmt: skip
        answer = promql(server, filled(expression("kansoku-gpu", title, 0)), here["end_ns"])
        assert [v for have, v in answer if labels.items() <= have.items()] == [value]


@pytest.mark.parametrize("server_name", ["victoria-metrics", "prometheus"])
def test_job_starts_are_marked_once(fleet, server_name):
    """The annotation on the overview: both jobs begin with the window, none at its end."""
    (mark,) = [
        one
        for one in BOARDS["kansoku-cluster"]["annotations"]["list"]
        if one["name"] == "job starts"
    ]
    server, end = fleet.servers[server_name], fleet.windows["after"]["end_ns"]
    begun = promql(server, mark["expr"], end - 270 * 10**9)
    assert {labels["slurm_job_id"] for labels, _ in begun} == {"417", "418"}
    assert promql(server, mark["expr"], end) == []


FIRES = {
    "GpuMemoryErrors", "PfcPaused", "NicDiscards", "LustreTargetLost", "FabricLoss", "FabricFault",
}  # fmt: skip
"""Rules whose hold time fits well into a window of five minutes."""


@pytest.mark.parametrize("window", ["before", "after"])
def test_rules_fire_for_the_device_at_fault(fleet, window):
    fault = fleet.windows[window]
    panel = next(
        p for p in BOARDS["kansoku-incidents"]["panels"] if p["title"] == "Rules that fire"
    )
    assert "ALERTS" in panel["targets"][0]["expr"]
    answer = promql(
        fleet.servers["victoria-metrics"],
        'count by (alertname, host_name, hw_name, network_interface_name, kansoku_target)'
        ' (last_over_time(ALERTS{alertstate="firing"}[3m]))',
        fault["end_ns"],
    )  # fmt: skip
    fired = {}
    for labels, _ in answer:
        fired.setdefault(labels["alertname"], []).append(labels)
    assert set(fired) - {"GpuThrottled"} == FIRES
    for name in ("GpuMemoryErrors", "PfcPaused", "NicDiscards", "LustreTargetLost"):
        assert {labels["host_name"] for labels in fired[name]} == {fault["node"]}
    assert fired["PfcPaused"][0]["network_interface_name"] == f"ens{fault['nic']}f0"
    assert fired["LustreTargetLost"][0]["kansoku_target"] == f"scratch-OST{fault['ost']:04x}"


def logs_of(fleet, title, name, **more):
    found = [t for board, panel, t in targets("victoriametrics-logs-datasource")
             if board == name and panel == title]  # fmt: skip
    return logsql(filled(found[0]["expr"], **more), fleet.gateway.logs)


def test_every_logsql_query_finds_entries_of_our_exporter(fleet):
    empty = [
        (name, title)
        for name, title, target in targets("victoriametrics-logs-datasource")
        if not logsql(filled(target["expr"]), fleet.gateway.logs)
    ]
    assert empty == []


def test_logsql_answers_hold_what_was_planted(fleet):
    bursts = logs_of(fleet, "Ports with the most bursts", "kansoku-bursts")
    ports = {(row["kansoku.node"], row["kansoku.port"], row["bursts"]) for row in bursts}
    assert ports == {("c001", "ens1f0", "5"), ("c002", "ens4f0", "5")}
    (worst, *_) = logs_of(fleet, "Worst paths", "kansoku-fabric")
    assert worst["lost"] == "14.0"
    assert worst["kansoku.target"] in {"c001/mlx5_1", "c002/mlx5_4"}
    incidents = logs_of(fleet, "Incidents", "kansoku-incidents", domain="gpu")
    assert [row["kansoku.subject"] for row in incidents] == ["node:c002", "node:c001"]
    assert logs_of(fleet, "Incidents", "kansoku-incidents", domain="^network$") == []
    (rank,) = logs_of(fleet, "Ranks: mean step and its parts", "kansoku-job")
    assert float(rank["step_ns"]) == pytest.approx(1e8)
    assert float(rank["forward_ns"]) == pytest.approx(5e7)
    changes = logs_of(fleet, "Jobs and nodes: changes", "kansoku-slurm")
    assert {"node:c001", "node:c002"} <= {row["kansoku.subject"] for row in changes}
    kinds = {row["kansoku.kind"] for row in logs_of(fleet, "Events by kind", "kansoku-incidents")}
    assert {"gpu_throttled", "node_state"} <= kinds


def test_traces_are_searched_by_the_service_and_tag_that_spans_have(fleet):
    (target,) = [t for _, _, t in targets("jaeger")]
    key, _, value = filled(target["tags"], run="slurm-417-0-0").partition("=")
    found = [tags for service, tags in fleet.gateway.spans if service == target["service"]]
    assert found
    assert {tags[key] for tags in found} == {value}


def test_our_own_store_asks_for_the_same_names(fleet):
    """What the collector's translation made is what analyses of a fleet read."""
    after = fleet.windows["after"]
    with open_fleet({"metrics": fleet.servers["victoria-metrics"].url}) as store:
        who = {"host.name": after["node"], "hw.name": f"gpu{after['gpu']}"}
        (row,) = store.latest("hw.power", who, at_ns=after["end_ns"]).to_dicts()
        assert row["value"] == 90
        assert json.loads(row["labels"])["hw.type"] == "gpu"
        held = store.latest("kansoku.slurm.job.gpu", {"slurm.job.id": "418"}, at_ns=after["end_ns"])
        assert len(held) == 4
        assert "slurm.partition" in json.loads(held["labels"][0])


def test_a_gateway_is_a_store_to_write_to(fleet):
    """The fabric controller's --store otlp+URL: rows become series of the translated name."""
    rows = {"metric": ["kansoku.fabric.rtt"], "labels": ['{"kansoku.scope":"service"}'],
            "time_ns": [1_700_000_000 * 10**9], "value": [5e-5]}  # fmt: skip
    before = set(fleet.gateway.series)
    with open_store(f"otlp+{fleet.gateway.url}") as store:
        store.append("metrics", pl.DataFrame(rows))
    (new,) = set(fleet.gateway.series) - before
    assert dict(new)["__name__"] == "kansoku_fabric_rtt_seconds"
