"""Every file of a deployment as text: no file is written here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from kansoku.deploy.alerts import alert_rules
from kansoku.deploy.settings import Settings, shipped_versions
from kansoku.deploy.units import units

__all__ = ["RenderedFile", "render_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    """One file."""

    path: str
    """Below the folder that is rendered into."""
    text: str
    mode: int = 0o644
    place: str | None = None
    """Where it goes on a fleet."""
    host: str | None = None
    """On which machines."""


_COMPOSE_URLS = {
    "metrics": "http://victoria-metrics:8428",
    "logs": "http://victoria-logs:9428",
    "traces": "http://victoria-traces:10428",
    "profiles": "http://pyroscope:4040",
}
_SLURM_SCRIPTS = ("prolog", "epilog", "task_prolog", "health_check")


def _quoted(text: str) -> str:
    """Return a YAML double-quoted scalar."""
    return json.dumps(text, ensure_ascii=False)


def _templates() -> jinja2.Environment:
    folder = resources.files("kansoku.deploy") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - no HTML is made; settings refuse what shells would read
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    return environment


def render_files(settings: Settings, *, banner: str) -> tuple[RenderedFile, ...]:
    """Return every file but the dashboards and the recorder's folder.

    ``banner`` is one line that says what rendered them and from what.
    """
    made = _Files(settings, " ".join(banner.split()))
    made.collector()
    made.stores()
    made.grafana()
    made.systemd()
    made.slurm()
    made.readme()
    return tuple(made.files)


class _Files:
    def __init__(self, settings: Settings, banner: str) -> None:
        self._settings = settings
        self._environment = _templates()
        kinds = {node.kind.name: node.kind for node in settings.cluster.nodes}
        self._shared = {
            "s": settings,
            "banner": banner,
            "versions": shipped_versions(),
            "kinds": tuple(kinds.values()),
        }
        self.files: list[RenderedFile] = []

    def _add(
        self,
        path: str,
        template: str,
        *,
        to: tuple[str, str] | None = None,
        mode: int = 0o644,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        text = self._environment.get_template(template).render(**self._shared, **(values or {}))
        place, host = to or (None, None)
        self.files.append(RenderedFile(path=path, text=text, mode=mode, place=place, host=host))

    def collector(self) -> None:
        etc = "/etc/kansoku"
        self._add("collector/gateway.yaml", "gateway.yaml.j2",
                  to=(f"{etc}/gateway.yaml", "gateway"))  # fmt: skip
        self._add("collector/gateway.env", "gateway.env.j2", mode=0o600,
                  to=(f"{etc}/gateway.env", "gateway"))  # fmt: skip
        self._add("collector/controller.yaml", "controller.yaml.j2",
                  to=(f"{etc}/controller.yaml", "Slurm controller"))  # fmt: skip
        self._add("node/agent.env", "agent.env.j2", mode=0o600,
                  to=(f"{etc}/agent.env", "every node, Slurm controller"))  # fmt: skip
        fabric = self._settings.cluster.fabric
        self._add("node/switches.toml", "switches.toml.j2", mode=0o600,
                  to=(f"{etc}/switches.toml", "one node"),
                  values={"switches": fabric.switches if fabric else ()})  # fmt: skip

    def stores(self) -> None:
        self._add("alerts/kansoku.rules.yaml", "alerts.yaml.j2",
                  to=("/etc/kansoku/kansoku.rules.yaml", "vmalert or Prometheus"),
                  values={"groups": alert_rules()})  # fmt: skip
        self._add("pyroscope/config.yaml", "pyroscope.yaml.j2",
                  to=("/etc/kansoku/pyroscope.yaml", "profile store"),
                  values={"listen": "127.0.0.1", "data": "/var/lib/pyroscope"})  # fmt: skip
        self._add("pyroscope/compose.yaml", "pyroscope.yaml.j2",
                  values={"listen": "0.0.0.0", "data": "/var/lib/pyroscope"})  # noqa: S104 # fmt: skip
        self._add("compose.yaml", "compose.yaml.j2")
        self._add("compose.env", "compose.env.j2")

    def grafana(self) -> None:
        urls = {address.name: address.url for address in self._settings.addresses()}
        base = "grafana/provisioning"
        self._add(f"{base}/datasources/kansoku.yaml", "datasources.yaml.j2",
                  to=("/etc/grafana/provisioning/datasources/kansoku.yaml", "Grafana"),
                  values={"urls": urls})  # fmt: skip
        self._add(f"{base}/compose-datasources/kansoku.yaml", "datasources.yaml.j2",
                  values={"urls": _COMPOSE_URLS})  # fmt: skip
        self._add(f"{base}/dashboards/kansoku.yaml", "dashboards.yaml.j2",
                  to=("/etc/grafana/provisioning/dashboards/kansoku.yaml", "Grafana"))  # fmt: skip

    def systemd(self) -> None:
        for unit in units(self._settings):
            name = f"{unit.name}.service"
            to = (f"/etc/systemd/system/{name}", unit.host)
            self._add(f"systemd/{name}", "unit.service.j2", to=to, values={"u": unit})
        self.files.append(
            RenderedFile(
                path="systemd/kansoku.tmpfiles",
                # Every user's tasks make a folder of their own in it; nobody removes another's.
                text=f"# {self._shared['banner']}\nd /dev/shm/kansoku 1777 root root -\n",
                place="/etc/tmpfiles.d/kansoku.conf",
                host="every node",
            )
        )
        for name, host in (
            ("vmalert", "metric store"),
            ("fabric-agent", "every node"),
            ("fabric-controller", "kansoku server"),
        ):
            to = (f"/etc/kansoku/{name}.env", host)
            self._add(f"systemd/{name}.env", f"{name}.env.j2", to=to, mode=0o600)

    def slurm(self) -> None:
        for name in _SLURM_SCRIPTS:
            self._add(f"slurm/{name}.sh", f"{name}.sh.j2", mode=0o755,
                      to=(f"/etc/slurm/kansoku/{name}.sh", "every node"))  # fmt: skip
        self._add("slurm/slurm.conf.lines", "slurm.conf.j2",
                  to=("/etc/slurm/slurm.conf (add)", "controller and nodes"))  # fmt: skip

    def readme(self) -> None:
        cluster = self._settings.cluster
        counts = [node.kind.gpus for node in cluster.nodes]
        gpus = None if None in counts else sum(count or 0 for count in counts)
        places = [(f.path, f.place, f.host) for f in self.files if f.place is not None]
        places += [
            ("grafana/dashboards/", "/var/lib/grafana/dashboards/kansoku/", "Grafana"),
            ("capture/", f"{self._settings.prefix}/capture/", "every node"),
            ("cluster.toml", f"/etc/kansoku/{cluster.name}.toml", "every machine"),
        ]
        self._add("README.md", "README.md.j2", values={
            "places": places, "node_count": len(cluster.nodes), "gpu_count": gpus,
        })  # fmt: skip
