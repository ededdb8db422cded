"""NVIDIA GPUs through NVML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kansoku.catalog.xid import clock_event_bits
from kansoku.errors import KansokuError
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.jobs_of_processes import slurm_job_of
from kansoku.node.sample import Event, Labels, Sample, labels

if TYPE_CHECKING:
    from kansoku.node.edge.nvml import FieldKey, NvmlLibrary

__all__ = ["Nvml"]

_ALL_LINKS = 0xFFFFFFFF
_MEMORY_TEMPERATURE, _POWER_INSTANT = 82, 186
_PCIE_TX, _PCIE_RX = 197, 198
_NVLINK_TX, _NVLINK_RX = (138, _ALL_LINKS), (139, _ALL_LINKS)
_RECOVERY_ACTION = 230
_FIELDS: list[FieldKey] = [
    _MEMORY_TEMPERATURE, _POWER_INSTANT, _PCIE_TX, _PCIE_RX, _NVLINK_TX, _NVLINK_RX,
    _RECOVERY_ACTION,
]  # fmt: skip
# GPM metric number to the catalogue's unit.
_ACTIVITY = {
    1: "graphics", 2: "sm", 3: "sm_occupancy", 5: "tensor", 10: "dram", 11: "fp64", 12: "fp32",
    13: "fp16",
}  # fmt: skip
_CLOCKS = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}
_VIOLATIONS = {
    0: "power", 1: "thermal", 2: "sync_boost", 3: "board_limit", 4: "low_utilization",
    5: "reliability", 10: "app_clock", 11: "base_clock",
}  # fmt: skip
_LINK_ERRORS = {0: "replay", 1: "recovery", 2: "crc_flit", 3: "crc_data"}
_MAX_LINKS = 18
_TASKS = {
    "nvmlDeviceGetEncoderUtilization": "encoder",
    "nvmlDeviceGetDecoderUtilization": "decoder",
    "nvmlDeviceGetJpgUtilization": "jpeg",
    "nvmlDeviceGetOfaUtilization": "optical_flow",
}
_KIB = 1024.0


class Nvml(Collector):
    """Everything the library offers of each GPU, its MIG instances and processes."""

    name = "nvml"
    title = "GPUs (NVML)"
    metrics = (
        "hw.gpu.utilization", "hw.gpu.memory.usage", "hw.gpu.memory.limit",
        "hw.gpu.memory.utilization", "hw.gpu.io", "hw.energy", "hw.power", "hw.temperature",
        "hw.errors", "kansoku.gpu.info", "kansoku.gpu.activity",
        "kansoku.gpu.memory.controller.utilization", "kansoku.gpu.power.limit",
        "kansoku.gpu.temperature.limit", "kansoku.gpu.clock.frequency", "kansoku.gpu.clock.limit",
        "kansoku.gpu.throttle.active", "kansoku.gpu.throttle.time", "kansoku.gpu.rows.remapped",
        "kansoku.gpu.rows.pending", "kansoku.gpu.rows.failed", "kansoku.gpu.nvlink.io",
        "kansoku.gpu.nvlink.errors", "kansoku.gpu.nvlink.up", "kansoku.gpu.pcie.generation",
        "kansoku.gpu.pcie.width", "kansoku.gpu.process.memory", "kansoku.gpu.process.count",
        "kansoku.gpu.mig.enabled", "kansoku.gpu.mig.memory.usage", "kansoku.gpu.mig.memory.limit",
        "kansoku.gpu.lost",
    )  # fmt: skip

    def __init__(self) -> None:
        self._library: NvmlLibrary | None = None
        self._handles: list[Any] = []
        self._facts: dict[int, Labels] = {}
        self._info: dict[int, Labels] = {}
        self._links: dict[int, list[int]] = {}
        self._lost: set[int] = set()
        self._recovery: dict[int, int] = {}
        self._throttled: dict[int, frozenset[str]] = {}

    def absent(self, host: Host) -> str | None:  # noqa: ARG002 - the plug-in's signature
        """No driver, no library, or no GPU."""
        from kansoku.node.edge.nvml import NvmlLibrary

        if self._library is None:
            try:
                self._library = NvmlLibrary()
            except KansokuError as error:
                return str(error)
        self._handles = self._library.handles()
        return None if self._handles else "the NVIDIA driver is here, but no GPU"

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Go through the GPUs; one that is lost costs only itself."""
        from kansoku.node.edge.nvml import GpuLostError

        library = self._library
        if library is None:
            return
        for gpu, handle in enumerate(self._handles):
            found: list[Sample | Event] = []
            lost = handle is None
            if not lost:
                try:
                    found.extend(self._gpu(host, library, gpu, handle))
                except GpuLostError:
                    lost = True
            yield from found
            who = self._facts.get(gpu) or labels(("hw.name", f"gpu{gpu}"), ("hw.type", "gpu"))
            yield Sample("kansoku.gpu.lost", who, float(lost))
            if lost and gpu not in self._lost:
                yield _event(host, gpu, "error", "gpu_lost", f"GPU {gpu} no longer answers")
            elif not lost and gpu in self._lost:
                yield _event(host, gpu, "info", "gpu_back", f"GPU {gpu} answers again")
            (self._lost.add if lost else self._lost.discard)(gpu)

    def _gpu(
        self, host: Host, nvml: NvmlLibrary, gpu: int, handle: Any
    ) -> Iterable[Sample | Event]:
        if gpu not in self._facts:
            self._learn(nvml, gpu, handle)
        who = self._facts[gpu]
        yield Sample("kansoku.gpu.info", self._info[gpu], 1.0)
        yield from _utilisation(nvml, gpu, handle, who)
        yield from _electricity(nvml, gpu, handle, who)
        yield from _clocks(nvml, gpu, handle, who)
        yield from self._throttling(host, nvml, gpu, handle)
        yield from _errors(nvml, gpu, handle, who)
        yield from self._nvlink(nvml, gpu, handle)
        yield from _pcie(nvml, gpu, handle, who)
        fields = nvml.fields(gpu, handle, _FIELDS)
        yield from _from_fields(fields, who)
        yield from self._recovery_event(host, gpu, fields.get(_RECOVERY_ACTION))
        yield from _mig(nvml, gpu, handle, who)
        yield from _processes(host, nvml, gpu, handle, who)

    def _learn(self, nvml: NvmlLibrary, gpu: int, handle: Any) -> None:
        def text(function: str) -> str | None:
            value: str | None = nvml.ask(gpu, function, handle)
            return value

        uuid = text("nvmlDeviceGetUUID") or f"gpu{gpu}"
        pairs = (("hw.id", uuid), ("hw.name", f"gpu{gpu}"), ("hw.type", "gpu"))
        self._facts[gpu] = labels(*pairs)
        pci = nvml.ask(gpu, "nvmlDeviceGetPciInfo", handle)
        bus = getattr(pci, "busId", None)
        driver = nvml.ask(gpu, "nvmlSystemGetDriverVersion")
        self._info[gpu] = labels(
            *pairs,
            ("hw.vendor", "NVIDIA"),
            ("hw.model", text("nvmlDeviceGetName")),
            ("hw.serial_number", text("nvmlDeviceGetSerial")),
            ("hw.firmware_version", text("nvmlDeviceGetVbiosVersion")),
            ("hw.driver_version", driver),
            ("kansoku.pci.address", bus.decode("ascii", "replace") if bus else None),
        )
        self._links[gpu] = [
            link
            for link in range(_MAX_LINKS)
            if nvml.ask(gpu, "nvmlDeviceGetNvLinkState", handle, link) is not None
        ]

    def _throttling(
        self, host: Host, nvml: NvmlLibrary, gpu: int, handle: Any
    ) -> Iterable[Sample | Event]:
        mask = nvml.ask(gpu, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:  # drivers before 535
            mask = nvml.ask(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if mask is None:
            return
        active = clock_event_bits(int(mask))
        for code in active:
            reason = ("kansoku.gpu.reason", code.mnemonic.lower())
            series = _with(self._facts[gpu], reason)
            yield Sample("kansoku.gpu.throttle.active", series, 1.0)
        harmful = frozenset(c.mnemonic for c in active if c.responsibility.startswith(
            ("hardware", "thermal")))  # fmt: skip
        for name in sorted(harmful - self._throttled.get(gpu, frozenset())):
            meaning = next(c.meaning for c in active if c.mnemonic == name)
            yield _event(host, gpu, "warning", "gpu_throttled", f"{name.lower()}: {meaning}")
        self._throttled[gpu] = harmful

    def _nvlink(self, nvml: NvmlLibrary, gpu: int, handle: Any) -> Iterable[Sample]:
        who = self._facts[gpu]
        for link in self._links[gpu]:
            state = nvml.ask(gpu, "nvmlDeviceGetNvLinkState", handle, link)
            series = _with(who, ("kansoku.nvlink", str(link)))
            if state is not None:
                yield Sample("kansoku.gpu.nvlink.up", series, float(state == 1))
            for number, kind in _LINK_ERRORS.items():
                count = nvml.ask(gpu, "nvmlDeviceGetNvLinkErrorCounter", handle, link, number)
                if count is not None:
                    error = _with(series, ("error.type", kind))
                    yield Sample("kansoku.gpu.nvlink.errors", error, float(count))

    def _recovery_event(self, host: Host, gpu: int, value: float | None) -> Iterable[Event]:
        from kansoku.catalog.xid import codes

        if value is None:
            return
        action, before = int(value), self._recovery.get(gpu, 0)
        self._recovery[gpu] = action
        code = codes().get(("gpu_recovery_action", action))
        if action != before:
            name = code.mnemonic.lower() if code else f"action {action}"
            severity = "error" if action else "info"
            body = f"the driver asks for: {name}"
            yield _event(host, gpu, severity, "gpu_recovery_action", body)

    def close(self) -> None:
        """Unload NVML."""
        if self._library is not None:
            self._library.close()
            self._library = None


def _with(series: Labels, *more: tuple[str, str]) -> Labels:
    return tuple(sorted((*series, *more)))


def _event(host: Host, gpu: int, severity: str, kind: str, body: str) -> Event:
    return Event(
        time_ns=host.now_ns(),
        source="nvml",
        subject=f"gpu:{host.name}/{gpu}",
        severity=severity,
        kind=kind,
        body=body,
    )


def _utilisation(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    rates = nvml.ask(gpu, "nvmlDeviceGetUtilizationRates", handle)
    if rates is not None:
        general = _with(who, ("hw.gpu.task", "general"))
        yield Sample("hw.gpu.utilization", general, rates.gpu / 100)
        yield Sample("kansoku.gpu.memory.controller.utilization", who, rates.memory / 100)
    for function, task in _TASKS.items():
        value = nvml.ask(gpu, function, handle)
        if value is not None:
            yield Sample("hw.gpu.utilization", _with(who, ("hw.gpu.task", task)), value[0] / 100)
    for unit, percent in nvml.activity(gpu, handle, _ACTIVITY).items():
        series = _with(who, ("kansoku.gpu.unit", unit))
        yield Sample("kansoku.gpu.activity", series, percent / 100)
    memory = nvml.ask(gpu, "nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        yield Sample("hw.gpu.memory.usage", who, float(memory.used))
        yield Sample("hw.gpu.memory.limit", who, float(memory.total))
        if memory.total:
            yield Sample("hw.gpu.memory.utilization", who, memory.used / memory.total)


def _electricity(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    for metric, function, factor in (
        ("hw.energy", "nvmlDeviceGetTotalEnergyConsumption", 1e-3),
        ("hw.power", "nvmlDeviceGetPowerUsage", 1e-3),
        ("kansoku.gpu.power.limit", "nvmlDeviceGetEnforcedPowerLimit", 1e-3),
    ):
        value = nvml.ask(gpu, function, handle)
        if value is not None:
            yield Sample(metric, who, value * factor)
    core = nvml.ask(gpu, "nvmlDeviceGetTemperature", handle, 0)
    if core is not None:
        yield Sample("hw.temperature", _with(who, ("hw.sensor_location", "core")), float(core))
    for number, limit in ((0, "shutdown"), (1, "slowdown")):
        value = nvml.ask(gpu, "nvmlDeviceGetTemperatureThreshold", handle, number)
        if value is not None:
            series = _with(who, ("kansoku.limit", limit))
            yield Sample("kansoku.gpu.temperature.limit", series, float(value))


def _clocks(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    for metric, function in (
        ("kansoku.gpu.clock.frequency", "nvmlDeviceGetClockInfo"),
        ("kansoku.gpu.clock.limit", "nvmlDeviceGetMaxClockInfo"),
    ):
        for number, clock in _CLOCKS.items():
            mhz = nvml.ask(gpu, function, handle, number)
            if mhz is not None:
                yield Sample(metric, _with(who, ("kansoku.gpu.clock", clock)), mhz * 1e6)
    for number, reason in _VIOLATIONS.items():
        violation = nvml.ask(gpu, "nvmlDeviceGetViolationStatus", handle, number)
        if violation is not None:
            series = _with(who, ("kansoku.gpu.reason", reason))
            # nanoseconds: NVML 12 and later say so; the header once said microseconds
            yield Sample("kansoku.gpu.throttle.time", series, violation.violationTime / 1e9)


def _errors(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    for number, kind in ((0, "ecc_corrected"), (1, "ecc_uncorrected")):
        # 1: aggregate over the life of the GPU, so a reboot is no reset
        count = nvml.ask(gpu, "nvmlDeviceGetTotalEccErrors", handle, number, 1)
        if count is not None:
            yield Sample("hw.errors", _with(who, ("error.type", kind)), float(count))
    replays = nvml.ask(gpu, "nvmlDeviceGetPcieReplayCounter", handle)
    if replays is not None:
        yield Sample("hw.errors", _with(who, ("error.type", "pcie_replay")), float(replays))
    rows = nvml.ask(gpu, "nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        corrected, uncorrected, pending, failed = rows
        for kind, count in (("correctable", corrected), ("uncorrectable", uncorrected)):
            series = _with(who, ("error.type", kind))
            yield Sample("kansoku.gpu.rows.remapped", series, float(count))
        yield Sample("kansoku.gpu.rows.pending", who, float(pending))
        yield Sample("kansoku.gpu.rows.failed", who, float(failed))


def _pcie(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    for metric, function, limit in (
        ("kansoku.gpu.pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration", "current"),
        ("kansoku.gpu.pcie.generation", "nvmlDeviceGetMaxPcieLinkGeneration", "max"),
        ("kansoku.gpu.pcie.width", "nvmlDeviceGetCurrPcieLinkWidth", "current"),
        ("kansoku.gpu.pcie.width", "nvmlDeviceGetMaxPcieLinkWidth", "max"),
    ):
        value = nvml.ask(gpu, function, handle)
        if value is not None:
            yield Sample(metric, _with(who, ("kansoku.limit", limit)), float(value))


def _from_fields(fields: dict[FieldKey, float], who: Labels) -> Iterable[Sample]:
    if _MEMORY_TEMPERATURE in fields:
        series = _with(who, ("hw.sensor_location", "memory"))
        yield Sample("hw.temperature", series, fields[_MEMORY_TEMPERATURE])
    for metric, keys, factor in (
        ("hw.gpu.io", (_PCIE_RX, _PCIE_TX), 1.0),
        ("kansoku.gpu.nvlink.io", (_NVLINK_RX, _NVLINK_TX), _KIB),
    ):
        for key, direction in zip(keys, ("receive", "transmit"), strict=True):
            if key in fields:
                series = _with(who, ("network.io.direction", direction))
                yield Sample(metric, series, fields[key] * factor)


def _mig(nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels) -> Iterable[Sample]:
    mode = nvml.ask(gpu, "nvmlDeviceGetMigMode", handle)
    if mode is None:
        return
    yield Sample("kansoku.gpu.mig.enabled", who, float(mode[0]))
    if not mode[0]:
        return
    for slot in range(nvml.ask(gpu, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = nvml.ask(gpu, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        if part is None:
            continue
        number = nvml.ask(gpu, "nvmlDeviceGetGpuInstanceId", part)
        memory = nvml.ask(gpu, "nvmlDeviceGetMemoryInfo", part)
        if number is not None and memory is not None:
            series = _with(who, ("kansoku.mig", str(number)))
            yield Sample("kansoku.gpu.mig.memory.usage", series, float(memory.used))
            yield Sample("kansoku.gpu.mig.memory.limit", series, float(memory.total))


def _processes(
    host: Host, nvml: NvmlLibrary, gpu: int, handle: Any, who: Labels
) -> Iterable[Sample]:
    found = nvml.ask(gpu, "nvmlDeviceGetComputeRunningProcesses", handle)
    if found is None:
        return
    yield Sample("kansoku.gpu.process.count", who, float(len(found)))
    for process in found:
        # Under MIG and in containers without the right: the process counts, its bytes do not
        if not process.known:
            continue
        series = labels(
            *who,
            ("process.pid", str(process.pid)),
            ("process.executable.name", (host.read(f"/proc/{process.pid}/comm") or "?").strip()),
            ("slurm.job.id", slurm_job_of(host.read(f"/proc/{process.pid}/cgroup") or "")),
        )
        yield Sample("kansoku.gpu.process.memory", series, float(process.usedGpuMemory))
