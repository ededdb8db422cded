"""What is deployed where: the settings that every rendered file shares."""

import csv
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from urllib.parse import urlsplit

from kansoku.catalog.cluster import Cluster
from kansoku.errors import ConfigurationError

__all__ = ["BackEndAddress", "Settings", "component_name", "shipped_versions"]

_VERSION = re.compile(r"v?(\d{1,5})\.(\d{1,5})(?:\.(\d{1,5}))?")

_DEFAULTS = {
    "metrics": "http://127.0.0.1:8428",
    "logs": "http://127.0.0.1:9428",
    "traces": "http://127.0.0.1:10428",
    "profiles": "http://127.0.0.1:4040",
    "grafana": "http://127.0.0.1:3000",
    "otlp": "http://127.0.0.1:4318",
    "kansoku": "http://127.0.0.1:8080",
}
"""Each product's own port on one host: what is rendered where the cluster file is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEndAddress:
    """Where one part listens."""

    name: str
    url: str
    known: bool
    """False where the cluster file does not say and ``url`` is this host and the usual port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that the templates read beside the cluster."""

    cluster: Cluster
    collector_version: str
    """Version of the OpenTelemetry Collector that names are written for."""
    tls: bool = False
    """The gateway's receivers speak TLS."""
    serve: bool = False
    """The gateway feeds ``kansoku serve`` too, on port 14318 of its own host."""
    prefix: str = "/opt/kansoku"
    """Where kansoku is installed on the nodes."""
    retention: Mapping[str, str] = field(
        default_factory=lambda: {"metrics": "400d", "logs": "90d", "traces": "14d"}
    )
    """How long each store keeps data, as VictoriaMetrics writes durations."""

    def __post_init__(self) -> None:
        """Refuse what would end up inside a shell script or a unit unquoted."""
        version_numbers(self.collector_version)
        if not re.fullmatch(r"/[A-Za-z0-9._/-]{1,200}", self.prefix):
            raise ConfigurationError(
                f"{self.prefix!r} is not an absolute path of plain characters", where="--prefix"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.cluster.name):
            raise ConfigurationError(
                f"name {self.cluster.name!r} holds characters that file names and units cannot",
                remedy="use letters, digits, dots and dashes",
            )
        for name in _DEFAULTS:
            self.address(name)

    def address(self, name: str) -> BackEndAddress:
        """Return where a back end is; raise ConfigurationError for an address that is no URL."""
        given = self.cluster.stores.get(name)
        if given is None:
            return BackEndAddress(name=name, url=_DEFAULTS[name], known=False)
        url = given.removeprefix("jaeger+").rstrip("/")
        parts = urlsplit(url)
        plain = re.fullmatch(r"[A-Za-z0-9._:/\[\]-]+", url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or plain is None:
            raise ConfigurationError(
                f"stores.{name} = {given!r} is no http(s) URL",
                remedy="write it as http://HOST:PORT",
            )
        return BackEndAddress(name=name, url=url, known=True)

    def addresses(self) -> tuple[BackEndAddress, ...]:
        """Return every back end's address."""
        return tuple(self.address(name) for name in _DEFAULTS)

    def component(self, kind: str, name: str) -> str:
        """Return what a collector component is called in the version rendered for."""
        return component_name(kind, name, self.collector_version)

    @property
    def new_collector(self) -> bool:
        """Whether batching belongs into the exporters' queue and names are snake case."""
        return version_numbers(self.collector_version) >= (0, 144, 0)

    def unknown(self) -> tuple[str, ...]:
        """Return sentences: what the rendered files had to assume."""
        found = [f"{sentence} (cluster file)" for sentence in self.cluster.unknown]
        found += [
            f"stores.{address.name}: {address.url} is assumed"
            for address in self.addresses()
            if not address.known
        ]
        for name, kind in {node.kind.name: node.kind for node in self.cluster.nodes}.items():
            if kind.gpus is None:
                found.append(f"node kind {name}: number of GPUs")
            if not kind.nics:
                found.append(f"node kind {name}: NICs")
        if self.cluster.fabric is None:
            found.append("fabric: no leaves and spines, so no switches to ask and no pinglists")
        if self.cluster.slurm_cluster is None:
            found.append("slurm_cluster: the ClusterName of slurm.conf")
        return tuple(found)


def version_numbers(text: str) -> tuple[int, int, int]:
    """Return a version as numbers; raise ConfigurationError for anything else."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a version such as 0.154.0")
    return int(match[1]), int(match[2]), int(match[3] or 0)


@cache
def _names() -> dict[tuple[str, str], tuple[str, tuple[int, int, int]]]:
    text = (resources.files("kansoku.deploy") / "data" / "collector_names.csv").read_text("utf-8")
    return {
        (row["kind"], row["name"]): (row["old_name"], version_numbers(row["since"]))
        for row in csv.DictReader(text.splitlines())
    }


def component_name(kind: str, name: str, version: str) -> str:
    """Return the collector's name of a component in a version.

    >>> component_name("exporter", "otlp_http", "0.143.0")
    'otlphttp'
    """
    try:
        old, since = _names()[kind, name]
    except KeyError:
        raise ConfigurationError(f"no collector {kind} {name!r} in the table of names") from None
    return name if version_numbers(version) >= since else old


@cache
def shipped_versions() -> Mapping[str, str]:
    """Return the versions that the files are written for."""
    text = (resources.files("kansoku.deploy") / "data" / "versions.toml").read_text("utf-8")
    return {name: str(version) for name, version in tomllib.loads(text).items()}
