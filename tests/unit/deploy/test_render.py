"""What is rendered, read by the programs that will read it where they are here."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from kansoku.app.deploy import DeployOptions, deploy_files, deploy_render
from kansoku.catalog.cluster import load_cluster, shipped_clusters
from kansoku.deploy import Settings, alert_rules, component_name
from kansoku.errors import ConfigurationError

OLD, NEW = "0.115.1", "0.154.0"


def texts(cluster="sakuraone-h100", **options):
    _, files = deploy_files(load_cluster(cluster), DeployOptions(dashboards=False, **options))
    return {file.path: file.text for file in files}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "out"
    answer, _ = deploy_render("sakuraone-h100", folder)
    return folder, answer


def test_the_whole_tree_is_there(rendered):
    folder, answer = rendered
    listed = {row["path"] for row in answer["files"]}
    for path in (
        "collector/gateway.yaml", "collector/controller.yaml", "compose.yaml", "README.md",
        "alerts/kansoku.rules.yaml", "pyroscope/config.yaml", "slurm/prolog.sh", "slurm/epilog.sh",
        "slurm/task_prolog.sh", "slurm/health_check.sh", "systemd/kansoku-agent.service",
        "systemd/victoria-metrics.service", "systemd/victoria-logs.service",
        "systemd/victoria-traces.service", "grafana/dashboards/kansoku-cluster.json",
        "grafana/provisioning/datasources/kansoku.yaml", "cluster.toml",
    ):  # fmt: skip
        assert path in listed
        assert (folder / path).is_file()
    assert (folder / "capture" / "sitecustomize.py").is_file()
    assert oct((folder / "node/agent.env").stat().st_mode & 0o777) == "0o600"
    assert os.access(folder / "slurm/prolog.sh", os.X_OK)
    assert load_cluster(folder / "cluster.toml").name == "sakuraone-h100"
    assert len(list((folder / "grafana/dashboards").glob("*.json"))) == 11


def test_yaml_is_read_whole_and_json_too(rendered):
    folder, _ = rendered
    read = [yaml.safe_load(path.read_text()) for path in folder.rglob("*.yaml")]
    assert len(read) >= 8
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())


@pytest.mark.parametrize("version", [OLD, "0.143.0", "0.144.0", NEW])
def test_gateway_pipelines_use_what_is_defined_in_names_of_the_version(version):
    gateway = yaml.safe_load(texts(collector_version=version)["collector/gateway.yaml"])
    new = version in {"0.144.0", NEW}
    exporter = "otlp_http" if new else "otlphttp"
    assert set(gateway["exporters"]) == {f"{exporter}/{s}" for s in ("metrics", "logs", "traces")}
    for signal, pipeline in gateway["service"]["pipelines"].items():
        assert pipeline["processors"][0] == "memory_limiter"
        assert ("batch" in pipeline["processors"]) != new
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(gateway[kind])
        (name,) = pipeline["exporters"]
        settings = gateway["exporters"][name]
        assert f"{signal}_endpoint" in settings
        assert settings["retry_on_failure"]["max_elapsed_time"] == "0s"
        queue = settings["sending_queue"]
        assert queue["storage"] in gateway["extensions"]
        assert ("batch" in queue) == new
        if new:  # the collector refuses to start where a batch cannot fit in the queue
            assert queue["sizer"] == queue["batch"]["sizer"] == "items"
            assert queue["batch"]["min_size"] <= queue["batch"]["max_size"] <= queue["queue_size"]
    assert set(gateway["service"]["extensions"]) == set(gateway["extensions"])
    authenticator = gateway["receivers"]["otlp"]["protocols"]["http"]["auth"]["authenticator"]
    assert authenticator in gateway["extensions"]


def test_component_names_change_at_the_version_that_renamed_them():
    assert component_name("receiver", "file_log", "0.149.0") == "filelog"
    assert component_name("receiver", "file_log", "v0.150.0") == "file_log"
    assert component_name("processor", "resource_detection", "0.152.9") == "resourcedetection"
    assert component_name("processor", "resource_detection", "0.153.0") == "resource_detection"
    controller = yaml.safe_load(texts(collector_version=OLD)["collector/controller.yaml"])
    assert list(controller["receivers"]) == ["filelog/slurm"]
    assert "resourcedetection" in controller["processors"]


def test_tls_is_rendered_in_and_out():
    plain, secret = texts()["collector/gateway.yaml"], texts(tls=True)["collector/gateway.yaml"]
    assert "cert_file" not in plain
    assert secret.count("cert_file") == 2
    assert "LoadCredential=gateway.key" in texts(tls=True)["systemd/kansoku-gateway.service"]


@pytest.mark.parametrize("version", [OLD, NEW])
def test_serve_gets_every_signal_too(version):
    gateway = yaml.safe_load(texts(serve=True, collector_version=version)["collector/gateway.yaml"])
    name = "otlp_http/serve" if version == NEW else "otlphttp/serve"
    assert gateway["exporters"][name]["endpoint"] == "${env:KANSOKU_SERVE_URL}"
    assert gateway["exporters"][name]["sending_queue"]["storage"] == "file_storage/queue"
    for pipeline in gateway["service"]["pipelines"].values():
        assert name in pipeline["exporters"]
    port = next(
        word.split("=")[1].rpartition(":")[2]
        for word in texts(serve=True)["collector/gateway.env"].splitlines()
        if word.startswith("KANSOKU_SERVE_URL")
    )
    assert f"--otlp-port {port}" in texts()["systemd/kansoku-serve.service"]


def test_nothing_listens_wider_than_loopback_by_default(rendered):
    folder, _ = rendered
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    environment = dict(
        line.split("=", 1)
        for line in (folder / "compose.env").read_text().splitlines()
        if line and line[0] != "#"
    )
    for service in compose["services"].values():
        for port in service.get("ports", ()):
            address = port.split(":")[0]
            assert environment.get(address.strip("${}"), address) == "127.0.0.1"
    assert "KANSOKU_LISTEN=127.0.0.1" in (folder / "collector/gateway.env").read_text()


def test_compose_names_only_volumes_files_and_services_it_has(rendered):
    folder, _ = rendered
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (folder / source).exists() if source[0] == "." else source in compose["volumes"]
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
    metrics = compose["services"]["victoria-metrics"]["command"]
    assert "-opentelemetry.usePrometheusNaming" in metrics, "the dashboards ask for those names"


@pytest.mark.parametrize("cluster", shipped_clusters())
def test_templates_render_with_their_unknowns_marked(cluster):
    found = texts(cluster)
    read = load_cluster(cluster)
    for sentence in read.unknown:
        assert sentence in found["README.md"]
    assert "stores.metrics: http://127.0.0.1:8428 is assumed" in found["README.md"]
    assert "# unknown: the cluster file has no stores.otlp" in found["node/agent.env"]
    switches = found["node/switches.toml"]
    assert ("# unknown: the cluster file names no switches" in switches) == (read.fabric is None)
    yaml.safe_load(found["collector/gateway.yaml"])


def test_addresses_of_the_cluster_file_are_used(tmp_path):
    text = shipped_clusters()["template-h200"].read_text()
    path = tmp_path / "mine.toml"
    path.write_text(
        text + '\n[stores]\nmetrics = "http://vm.cluster:8428/"\notlp = "https://gw:4318"\n'
        'traces = "jaeger+http://jaeger:16686"\n'
    )
    found = texts(path)
    assert "KANSOKU_METRICS_URL=http://vm.cluster:8428\n" in found["collector/gateway.env"]
    assert "KANSOKU_ENDPOINT=https://gw:4318\n" in found["node/agent.env"]
    assert "stores.metrics" not in found["README.md"]
    assert "-datasource.url=http://vm.cluster:8428" in found["systemd/vmalert.service"]


@pytest.mark.parametrize(
    "stores",
    ['metrics = "vm:8428"', 'otlp = "http://a b"', 'logs = "http://x;reboot"', 'logs = "file:///x"',
     'profiles = "http://$(id)"', 'kansoku = "http://x\\nExecStart=/bin/sh"'],
)  # fmt: skip
def test_an_address_that_could_break_out_is_refused(tmp_path, stores):
    path = tmp_path / "bad.toml"
    path.write_text(shipped_clusters()["template-h200"].read_text() + f"\n[stores]\n{stores}\n")
    with pytest.raises(ConfigurationError, match="is no http"):
        texts(path)


@pytest.mark.parametrize("prefix", ["relative", "/opt/a b", "/opt/$(id)", "/opt/'x'"])
def test_a_prefix_that_shells_would_read_is_refused(prefix):
    with pytest.raises(ConfigurationError, match="plain characters"):
        texts(prefix=prefix)


def test_a_cluster_name_that_paths_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    text = shipped_clusters()["template-h200"].read_text()
    path.write_text(text.replace('name = "template-h200"', 'name = "../../etc/x"'))
    with pytest.raises(ConfigurationError, match="file names and units cannot"):
        texts(path)


def test_a_version_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="is not a version"):
        texts(collector_version="latest")
    with pytest.raises(ConfigurationError, match="table of names"):
        component_name("exporter", "kafka", NEW)
    with pytest.raises(ConfigurationError):
        Settings(cluster=load_cluster("template-h200"), collector_version="1")


def test_rendering_again_replaces_and_removes_only_its_own(tmp_path):
    out = tmp_path / "out"
    deploy_render("sakuraone-h100", out)
    assert (out / "grafana/dashboards/kansoku-job.json").exists()
    (out / "mine.txt").write_text("kept")
    deploy_render("sakuraone-h100", out, options=DeployOptions(dashboards=False))
    assert not (out / "grafana/dashboards/kansoku-job.json").exists()
    assert (out / "mine.txt").read_text() == "kept"


def test_a_folder_of_somebody_elses_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigurationError, match="was not rendered by kansoku"):
        deploy_render("sakuraone-h100", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_forged_list_removes_nothing_outside(tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("x")
    deploy_render("template-h200", out, options=DeployOptions(dashboards=False))
    with (out / ".kansoku-rendered").open("a") as stream:
        stream.write(f"../victim\n{victim}\n")
    deploy_render("template-h200", out, options=DeployOptions(dashboards=False))
    assert victim.exists()


def test_a_dry_run_writes_nothing(tmp_path):
    answer, view = deploy_render("sakuraone-h100", tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert answer["written"] is False
    assert view.blocks[0].title == "Would write"


needs = {
    name: pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not on PATH")
    for name in ("promtool", "systemd-analyze", "vmalert", "otelcol-contrib")
}


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **more)
    return done.returncode, done.stdout + done.stderr


@needs["promtool"]
def test_promtool_reads_the_rules(rendered):
    code, said = run("promtool", "check", "rules", rendered[0] / "alerts/kansoku.rules.yaml")
    assert code == 0, said
    count = sum(map(len, alert_rules().values()))
    assert f"{count} rules found" in said


@needs["vmalert"]
def test_vmalert_reads_the_rules(rendered):
    rules = rendered[0] / "alerts/kansoku.rules.yaml"
    code, said = run("vmalert", f"-rule={rules}", "-dryRun", "-rule.validateTemplates=true")
    assert code == 0, said


@needs["promtool"]
def test_promtool_fires_the_rules_on_planted_series(rendered, tmp_path):
    """Series by hand; the rest of the rules fire in tests/real/deploy on the agent's own."""
    rules = rendered[0] / "alerts/kansoku.rules.yaml"
    gpu = 'host_name="c001",hw_name="gpu3"'
    cases = {
        "GpuLost": (f"kansoku_gpu_lost_ratio{{{gpu}}}", "0 0 1x30", "3m"),
        "GpuRowRemapFailed": (f"kansoku_gpu_rows_failed_ratio{{{gpu}}}", "1x30", "1m"),
        "NvlinkDown": (f'kansoku_gpu_nvlink_up_ratio{{{gpu},kansoku_nvlink="4"}}', "0x30", "3m"),
        "NicDown": ('hw_network_up{host_name="c001",hw_name="mlx5_0",hw_type="network"}', "0x30", "3m"),
        "GatewayQueueFills": ('otelcol_exporter_queue_size{exporter="otlp_http/logs"}', "90x30", "8m"),
        "AgentGone": ('kansoku_agent_samples_total{host_name="c001"}', "1x5 _x40", "30m"),
        "HostMemoryLow": ('system_linux_memory_available_bytes{host_name="c001"}', "1x30", "4m"),
    }  # fmt: skip
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values},
                    {"series": 'otelcol_exporter_queue_capacity{exporter="otlp_http/logs"}', "values": "100x60"},
                    {"series": 'system_memory_limit_bytes{host_name="c001"}', "values": "100x60"},
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
            for name, (series, values, at) in cases.items()
        ],
    }  # fmt: skip
    file = tmp_path / "rules_test.yaml"
    file.write_text(yaml.safe_dump(test))
    code, said = run("promtool", "test", "rules", file)
    assert code == 0, said


@needs["systemd-analyze"]
def test_systemd_reads_the_units(rendered, tmp_path):
    """Programs that are not installed here are the only complaint."""
    units = sorted((rendered[0] / "systemd").glob("*.service"))
    _, said = run("systemd-analyze", "verify", *units)
    left = [
        line
        for line in said.splitlines()
        if "is not executable: No such file or directory" not in line and units[0].parent.name in line
    ]  # fmt: skip
    assert left == []
    assert "Unknown" not in said


@needs["systemd-analyze"]
def test_services_with_a_user_of_their_own_are_closed_in(rendered):
    """systemd's own exposure score, 0 (closed) to 10 (open)."""
    for name, most in (("victoria-logs", 3.0), ("kansoku-gateway", 3.0), ("kansoku-agent", 6.0)):
        unit = rendered[0] / f"systemd/{name}.service"
        code, said = run(
            "systemd-analyze", "security", "--offline=true", f"--threshold={most * 10:.0f}", unit
        )
        assert code == 0, said[-300:]


def test_scripts_are_sound(rendered):
    scripts = sorted((rendered[0] / "slurm").glob("*.sh"))
    assert len(scripts) == 4
    checker = shutil.which("shellcheck") or str(Path(os.sys.executable).with_name("shellcheck"))
    if Path(checker).exists():
        code, said = run(checker, *scripts)
        assert code == 0, said
    for script in scripts:
        code, said = run("sh", "-n", script)
        assert code == 0, said


@needs["otelcol-contrib"]
@pytest.mark.real
def test_the_collector_reads_its_configuration(rendered):
    gateway = rendered[0] / "collector/gateway.yaml"
    code, said = run("otelcol-contrib", "validate", f"--config={gateway}")
    assert code == 0, said


def help_of(*words):
    from kansoku.cli._main import app

    out = io.StringIO()
    with redirect_stdout(out):
        app([*words, "--help"], prog_name="kansoku", standalone_mode=False)
    return set(re.findall(r"--[a-z][a-z-]+", out.getvalue()))


def kansoku_lines(rendered):
    """(file, words before the first flag, flags) of every command line of ours."""
    folder, _ = rendered
    for path in sorted(folder.glob("systemd/*.service")):
        line = path.read_text().replace("\\\n", " ")
        for words in re.findall(r"^ExecStart=/opt/kansoku/bin/kansoku (.+)$", line, re.MULTILINE):
            parts = words.split()
            verb = list(itertools.takewhile(lambda word: word[0] not in "-$", parts))
            yield path.name, verb, {word for word in parts if word.startswith("--")}
    for path in sorted(folder.glob("slurm/*.sh")):
        for words in re.findall(r'"\$GUARD" (guard [^)]+?) 2>&1', path.read_text()):
            yield path.name, ["guard"], {w for w in words.split() if w.startswith("--")}


def test_our_own_commands_take_the_flags_they_are_given(rendered, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = list(kansoku_lines(rendered))
    assert len(found) == 4 + 3
    for name, verb, flags in found:
        assert flags <= help_of(*verb), (name, verb)


def test_units_find_every_variable_in_their_environment_file(rendered):
    folder, answer = rendered
    places = {row["place"]: row["path"] for row in answer["files"] if row["place"]}
    for path in sorted(folder.glob("systemd/*.service")):
        text = path.read_text()
        used = set(re.findall(r"\$\{?([A-Z_]+)\}?", text))
        file = re.search(r"^EnvironmentFile=(.+)$", text, re.MULTILINE)
        given = set(re.findall(r"^Environment=([A-Z_]+)=", text, re.MULTILINE))
        if file:
            given |= set(
                re.findall(r"^([A-Z_]+)=", (folder / places[file[1]]).read_text(), re.MULTILINE)
            )
        assert used <= given, path.name
    for name in ("gateway", "controller"):
        text = (folder / f"collector/{name}.yaml").read_text()
        used = set(re.findall(r"\$\{env:([A-Z_]+)\}", text))
        unit = (
            folder
            / f"systemd/kansoku-{'gateway' if name == 'gateway' else 'controller-log'}.service"
        )
        file = re.search(r"^EnvironmentFile=(.+)$", unit.read_text(), re.MULTILINE)
        given = set(
            re.findall(r"^([A-Z_]+)=", (folder / places[file[1]]).read_text(), re.MULTILINE)
        )
        given |= set(re.findall(r"^Environment=([A-Z_]+)=", unit.read_text(), re.MULTILINE))
        assert used <= given, name
        if name == "gateway":
            compose = yaml.safe_load((folder / "compose.yaml").read_text())
            assert used <= set(compose["services"]["gateway"]["environment"])
