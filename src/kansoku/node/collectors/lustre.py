"""Lustre client: bytes, operations and their times, state of every target."""

from collections.abc import Iterable

from kansoku.formats.lustre import filesystem_of, parse_import_state, parse_lustre_stats
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels

__all__ = ["Lustre"]

_ROOTS = ("/sys/kernel/debug/lustre", "/proc/fs/lustre")  # newer releases moved to debugfs
_STATE_ROOTS = ("/sys/fs/lustre", "/proc/fs/lustre", "/sys/kernel/debug/lustre")
_HEALTHY = frozenset({"FULL", "IDLE"})
_SECONDS = {"usecs": 1e-6, "usec": 1e-6}
_DIRECTIONS = {"read_bytes": "read", "write_bytes": "write"}


class Lustre(Collector):
    """llite/*/stats, and the import files of osc and mdc."""

    name = "lustre"
    title = "Lustre client"
    metrics = (
        "kansoku.lustre.io",
        "kansoku.lustre.operations",
        "kansoku.lustre.operation_time",
        "kansoku.lustre.target.up",
    )

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def absent(self, host: Host) -> str | None:
        """Nodes without a Lustre mount."""
        if any(host.names(f"{root}/llite") for root in _ROOTS):
            return None
        return "no Lustre client (no llite folder in /proc/fs/lustre or debugfs)"

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Counters of each mounted file system, then each target's connection."""
        for root in _ROOTS:
            for client in host.names(f"{root}/llite"):
                text = host.read(f"{root}/llite/{client}/stats")
                if text is not None:
                    yield from _statistics(filesystem_of(client), text)
        seen: set[str] = set()
        for root in _STATE_ROOTS:
            for layer in ("osc", "mdc"):
                for folder in host.names(f"{root}/{layer}"):
                    text = host.read(f"{root}/{layer}/{folder}/import")
                    target, state = parse_import_state(text or "")
                    if target is None or state is None or folder in seen:
                        continue
                    seen.add(folder)
                    yield from self._target(host, target, state)

    def _target(self, host: Host, target: str, state: str) -> Iterable[Sample | Event]:
        healthy = state in _HEALTHY
        series = labels(
            ("kansoku.filesystem", target.partition("-")[0]), ("kansoku.target", target)
        )
        yield Sample("kansoku.lustre.target.up", series, 1.0 if healthy else 0.0)
        before = self._states.get(target)
        self._states[target] = state
        if before != state and (before is not None or not healthy):
            yield Event(
                time_ns=host.now_ns(),
                source="lustre",
                subject=f"storage:{target.partition('-')[0]}",
                severity="info" if healthy else "error",
                kind="lustre_target_state",
                body=f"{target}: {before or 'unknown'} → {state}",
                attributes={"kansoku.target": target, "lustre.state": state.lower()},
            )


def _statistics(filesystem: str, text: str) -> Iterable[Sample]:
    who = ("kansoku.filesystem", filesystem)
    for name, stat in parse_lustre_stats(text)[0].items():
        if name in _DIRECTIONS and stat.unit == "bytes" and stat.total is not None:
            series = labels(who, ("disk.io.direction", _DIRECTIONS[name]))
            yield Sample("kansoku.lustre.io", series, float(stat.total))
        operation = labels(who, ("kansoku.operation", name))
        yield Sample("kansoku.lustre.operations", operation, float(stat.count))
        if stat.unit in _SECONDS and stat.total is not None:
            seconds = stat.total * _SECONDS[stat.unit]
            yield Sample("kansoku.lustre.operation_time", operation, seconds)
