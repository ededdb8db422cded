"""Names of metrics and labels in a PromQL back end.

OpenTelemetry says ``hw.gpu.power`` and ``host.name``; Prometheus before 3 knows only letters,
digits and underscores, and collectors translate. ``prometheus`` naming turns every other
character into an underscore and back again for the labels it knows; ``verbatim`` leaves names as
they are (VictoriaMetrics keeps OTLP's names so).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kansoku.errors import ConfigurationError
from kansoku.store._interface import Matcher

__all__ = ["KNOWN_LABELS", "Naming"]

KNOWN_LABELS = (
    "host.name", "service.name", "service.instance.id", "service.version", "slurm.job.id",
    "slurm.job.user", "slurm.job.account", "slurm.partition", "kansoku.run", "hw.id", "hw.name",
    "hw.type", "hw.vendor", "hw.model", "hw.parent", "hw.state", "hw.gpu.task",
    "network.io.direction",
    "network.interface.name", "disk.io.direction", "system.device", "system.memory.state",
    "system.filesystem.state", "cpu.mode", "error.type", "process.command",
)  # fmt: skip
"""Labels with dots that our own metrics use: recognised in their underscored form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How our names are written there."""

    style: str = "prometheus"
    labels: Iterable[str] = KNOWN_LABELS
    suffixes: Mapping[str, str] = field(default_factory=dict)
    """Metric to what a collector appended to its name, such as ``_watts`` or ``_total``."""

    def __post_init__(self) -> None:
        if self.style not in {"prometheus", "verbatim"}:
            raise ConfigurationError(f"naming {self.style!r} is not prometheus or verbatim")

    def _plain(self, name: str) -> str:
        name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
        return f"_{name}" if name[:1].isdigit() else name

    def metric(self, name: str) -> str:
        """Return a metric's name there."""
        plain = name if self.style == "verbatim" else self._plain(name)
        return plain + self.suffixes.get(name, "")

    def label(self, name: str) -> str:
        """Return a label's name there."""
        return name if self.style == "verbatim" else self._plain(name).replace(":", "_")

    def back(self, labels: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
        """Return labels under our names; ``also`` are names the caller used."""
        if self.style == "verbatim":
            return {key: value for key, value in labels.items() if key != "__name__"}
        known = {self.label(name): name for name in (*self.labels, *also)}
        return {known.get(key, key): value for key, value in labels.items() if key != "__name__"}

    def selector(self, metric: str | None, matchers: Iterable[Matcher]) -> str:
        """Return a PromQL selector, every name and value quoted."""
        parts = []
        if metric is not None:
            parts.append(f"__name__={_quoted(self.metric(metric))}")
        for one in matchers:
            label = self.label(one.label)
            if self.style == "verbatim":
                label = re.sub(r"([^a-zA-Z0-9_])", r"\\\1", label)
            parts.append(f"{label}{one.operator}{_quoted(one.value)}")
        return "{" + ",".join(parts or ['__name__!=""']) + "}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
