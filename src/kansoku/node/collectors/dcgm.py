"""GPUs through the text of a DCGM exporter, where one runs already."""

from collections.abc import Callable, Iterable

from kansoku.errors import InputError
from kansoku.formats.dcgm import parse_dcgm
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels

__all__ = ["Dcgm"]

Fetch = Callable[[str], str]
"""Text at a URL; raises OSError."""


class Dcgm(Collector):
    """``--dcgm URL``, such as http://localhost:9400/metrics."""

    name = "dcgm"
    title = "GPUs (DCGM exporter)"
    metrics = (
        "hw.gpu.utilization", "hw.gpu.memory.usage", "hw.gpu.memory.limit", "hw.power",
        "hw.energy", "hw.temperature", "hw.errors", "kansoku.gpu.activity",
        "kansoku.gpu.memory.controller.utilization", "kansoku.gpu.power.limit",
        "kansoku.gpu.clock.frequency", "kansoku.gpu.throttle.time", "kansoku.gpu.rows.remapped",
        "kansoku.gpu.rows.pending", "kansoku.gpu.rows.failed", "kansoku.gpu.nvlink.errors",
        "kansoku.gpu.xid", "kansoku.dcgm.rate",
    )  # fmt: skip

    def __init__(self, *, dcgm_url: str | None = None, fetch: Fetch | None = None) -> None:
        """Read ``dcgm_url``; ``fetch`` replaces the HTTP client in tests."""
        self._url = dcgm_url
        if fetch is None:
            from kansoku.node.edge.http import fetch_text

            fetch = fetch_text
        self._fetch = fetch
        self._xids: dict[str, float] = {}

    def absent(self, host: Host) -> str | None:  # noqa: ARG002 - the plug-in's signature
        """Only where a URL was given: NVML sees the same GPUs without an exporter."""
        return None if self._url else "no DCGM exporter configured (--dcgm URL)"

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Sentinels are left out; MIG instances carry their id in ``kansoku.mig``."""
        text = self._fetch(self._url or "")
        readings, _, _ = parse_dcgm(text)
        if not readings and "DCGM_FI_" not in text and "dcgm_" not in text:
            raise InputError("no DCGM metric in the answer", where=self._url)
        for reading in readings:
            series = labels(
                ("hw.id", reading.uuid),
                ("hw.name", f"gpu{reading.gpu}"),
                ("hw.type", "gpu"),
                ("kansoku.mig", reading.mig),
                *reading.field.labels,
            )
            yield Sample(reading.field.metric, series, reading.value)
            if reading.field.metric == "kansoku.gpu.xid":
                yield from self._xid(host, reading.gpu, reading.value)

    def _xid(self, host: Host, gpu: str, value: float) -> Iterable[Event]:
        from kansoku.catalog.xid import xid

        if self._xids.get(gpu) == value:
            return
        self._xids[gpu] = value
        code = xid(int(value))
        yield Event(
            time_ns=host.now_ns(),
            source="dcgm",
            subject=f"gpu:{host.name}/{gpu}",
            severity=code.severity if code else "warning",
            kind="xid",
            body=f"Xid {int(value)}: {code.meaning if code else 'no source names this code'}",
            attributes={"code": str(int(value))},
        )
