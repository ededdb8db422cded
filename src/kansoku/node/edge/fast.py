"""Read energy, activity, NIC and NVLink bytes every 10-100 ms while a job is watched."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

from kansoku.errors import KansokuError
from kansoku.node.resources import GPU_INDEX, SAMPLES_SCHEMA
from kansoku.node.sharing import NODE, OTHER_RANKS

__all__ = ["FastSampler", "read_samples"]

_FLUSH_ROWS = 200_000
_NVLINK = {(138, 0xFFFFFFFF): "nvlink_transmit_bytes", (139, 0xFFFFFFFF): "nvlink_receive_bytes"}
_KIB = 1024.0
_LOOK_S = 1.0
LookForOthers = Callable[[Mapping[str, str]], Mapping[str, float | None]]
"""Given the devices of the GPUs' UUIDs, return how many ranks of other jobs are on which device;
a device that is not named has none, None: some, nobody knows how many."""
Reading = tuple[str, str, Callable[[], float | None]]


class _File:
    """One number in a file kept open: 1.3 µs a reading."""

    def __init__(self, path: Path, factor: float) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._factor = factor

    def __call__(self) -> float | None:
        try:
            return int(os.pread(self._descriptor, 32, 0)) * self._factor
        except (OSError, ValueError):
            return None


class FastSampler:
    """A thread that reads this node and writes ``resources-NNNNN.parquet`` into a folder.

    Use as a context manager around the job. A reading that fails is left out; a folder that
    cannot be written ends the sampling and nothing else. ``look_for_others`` is asked once a second
    who else is on this node.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        interval_s: float = 0.05,
        root: str = "/",
        look_for_others: LookForOthers | None = None,
    ) -> None:
        """Find what can be read; start with :meth:`start` or ``with``."""
        self._folder = folder
        self._node = node
        self.interval_s = max(interval_s, 0.01)  # RDMA counters are renewed every 10 ms only
        """Time between readings; may be changed while it runs."""
        self._root = Path(root)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fast-sampler", daemon=True)
        self._columns: dict[str, list[Any]] = {
            "device": [],
            "quantity": [],
            "time_ns": [],
            "value": [],
        }
        self._files = _next_number(folder)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._look = look_for_others
        self._look_due = 0.0
        self._nvml: Any = None
        self._gpus: list[str] = []
        self.uuids: dict[str, str] = {}
        """UUID to device of the GPUs here."""
        self.cpu_s = 0.0
        """CPU time that the readings took."""
        self.late = 0
        """Ticks that came more than one interval late."""
        self.error: str | None = None
        self._readings: list[Reading] = [*self._nic_readings(), *self._host_readings()]
        self._readings += self._gpu_readings()

    @property
    def quantities(self) -> set[str]:
        """What is read here."""
        return {quantity for _, quantity, _ in self._readings}

    def _open(self, path: Path, factor: float = 1.0) -> _File | None:
        try:
            return _File(path, factor)
        except OSError:
            return None

    def _nic_readings(self) -> list[Reading]:
        found: list[Reading] = []
        net, rdma = self._root / "sys/class/net", self._root / "sys/class/infiniband"
        for port in sorted(rdma.glob("*/ports/*")):
            # RoCE passes by the kernel's interface counters; these see both, in words of 4 bytes
            for name, quantity in (("rcv", "receive_bytes"), ("xmit", "transmit_bytes")):
                file = self._open(port / "counters" / f"port_{name}_data", 4.0)
                if file is not None:
                    found.append((port.parent.parent.name, quantity, file))
        have = {device for device, _, _ in found}
        for interface in sorted(net.glob("*")):
            under_rdma = {p.name for p in (interface / "device" / "infiniband").glob("*")}
            if interface.name == "lo" or not (interface / "device").exists() or under_rdma & have:
                continue
            for name, quantity in (("rx", "receive_bytes"), ("tx", "transmit_bytes")):
                file = self._open(interface / "statistics" / f"{name}_bytes")
                if file is not None:
                    found.append((interface.name, quantity, file))
        return found

    def _host_readings(self) -> list[Reading]:
        found: list[Reading] = []
        for zone in sorted((self._root / "sys/class/powercap").glob("intel-rapl:*")):
            file = self._open(zone / "energy_uj", 1e-6)
            name = self._root / zone / "name"
            # core and uncore are parts of the package: counted once
            if file is not None and zone.name.count(":") == 1:
                found.append((name.read_text().strip() if name.exists() else zone.name,
                              "energy_j", file))  # fmt: skip
        return found

    def _gpu_readings(self) -> list[Reading]:
        from kansoku.node.edge.nvml import NvmlLibrary

        try:
            self._nvml = nvml = NvmlLibrary()
        except KansokuError:
            return []
        found: list[Reading] = []
        for gpu, handle in enumerate(nvml.handles()):
            if handle is None:
                continue
            device = f"gpu{gpu}"
            self._gpus.append(device)
            uuid = nvml.ask(gpu, "nvmlDeviceGetUUID", handle)
            if uuid:
                self.uuids[uuid.decode() if isinstance(uuid, bytes) else str(uuid)] = device
            energy = "nvmlDeviceGetTotalEnergyConsumption"
            if nvml.ask(gpu, energy, handle) is not None:
                found.append((device, "energy_j", _scaled(nvml, gpu, energy, handle)))
            else:
                found.append(
                    (device, "power_w", _scaled(nvml, gpu, "nvmlDeviceGetPowerUsage", handle))
                )
            found.append((device, "sm_activity", _rate(nvml, gpu, handle, "gpu")))
            found.append((device, "memory_activity", _rate(nvml, gpu, handle, "memory")))
            for key, quantity in _NVLINK.items():
                found.append((device, quantity, _field(nvml, gpu, handle, key)))
        return found

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.read_once()
            if len(self._columns["value"]) >= _FLUSH_ROWS and not self.flush():
                return
            self.cpu_s = time.thread_time()
            now = time.monotonic()
            due += self.interval_s
            if due < now:
                self.late += 1
                due = now
            self._stop.wait(due - now)
        self.read_once()
        self.flush()
        self.cpu_s = time.thread_time()

    def read_once(self) -> None:
        """Take one reading of everything, each with its own stamp."""
        with self._reading:
            self._read(self._columns)
            if self._look is not None and time.monotonic() >= self._look_due:
                self._look_due = time.monotonic() + _LOOK_S
                self._note_others(self._look, self._columns)

    def _note_others(self, look: LookForOthers, columns: dict[str, list[Any]]) -> None:
        try:
            others = look(self.uuids)
        except Exception as error:  # noqa: BLE001 - see read_once
            self.error = f"other jobs: {error}"
            return
        for device in (NODE, *self._gpus):
            _append(columns, device, OTHER_RANKS, others.get(device, 0.0))

    def _read(self, columns: dict[str, list[Any]]) -> None:
        for device, quantity, read in self._readings:
            try:
                value = read()
            except Exception as error:  # noqa: BLE001 - a lost GPU must not end the sampling
                self.error = f"{device} {quantity}: {error}"
                continue
            if value is not None:
                _append(columns, device, quantity, value)

    def flush(self) -> bool:
        """Write what was read since the last time; from any thread. False where that failed."""
        with self._writing:
            with self._reading:
                columns, self._columns = self._columns, {name: [] for name in self._columns}
            return not columns["value"] or self._write(columns)

    def _write(self, columns: dict[str, list[Any]]) -> bool:
        for uuid, device in self.uuids.items():
            _append(columns, uuid, GPU_INDEX, float(device.removeprefix("gpu")))
        rows = pl.DataFrame(
            {"node": [self._node] * len(columns["value"]), **columns}, SAMPLES_SCHEMA
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f".resources-{self._files:05d}"
            rows.write_parquet(part, compression="zstd")
            part.rename(self._folder / f"resources-{self._files:05d}.parquet")
        except (OSError, pl.exceptions.PolarsError) as error:  # a full disk is either
            self.error = f"{self._folder}: {error}"
            return False
        self._files += 1
        return True

    def close(self) -> None:
        """Take a last reading, write what is left, end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _append(columns: dict[str, list[Any]], device: str, quantity: str, value: float | None) -> None:
    columns["device"].append(device)
    columns["quantity"].append(quantity)
    columns["time_ns"].append(time.time_ns())
    columns["value"].append(value)


def _next_number(folder: Path) -> int:
    """Return the number after those of the files that are there: nothing is written over."""
    numbers = [p.stem.partition("-")[2] for p in folder.glob("resources-*.parquet")]
    return max((int(n) + 1 for n in numbers if n.isdecimal()), default=0)


def _scaled(nvml: Any, gpu: int, function: str, handle: Any) -> Callable[[], float | None]:
    def read() -> float | None:
        value = nvml.ask(gpu, function, handle)
        return None if value is None else value / 1000

    return read


def _rate(nvml: Any, gpu: int, handle: Any, part: str) -> Callable[[], float | None]:
    def read() -> float | None:
        rates = nvml.ask(gpu, "nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else getattr(rates, part) / 100

    return read


def _field(nvml: Any, gpu: int, handle: Any, key: Any) -> Callable[[], float | None]:
    def read() -> float | None:
        value = nvml.fields(gpu, handle, [key]).get(key)
        return None if value is None else value * _KIB

    return read


def read_samples(run_folder: Path, missing: list[str]) -> pl.DataFrame:
    """Return every sample under a run folder; empty where none were taken.

    What cannot be read is left out and becomes a sentence in ``missing``.
    """
    files = sorted(run_folder.glob("resources-*.parquet")) + sorted(
        run_folder.glob("*/resources-*.parquet")
    )
    frames = []
    for file in files:
        try:
            if not file.is_file():  # a named pipe would be waited for
                raise OSError("not a regular file")
            frame = pl.read_parquet(file, columns=list(SAMPLES_SCHEMA))
            frames.append(frame.cast(pl.Schema(SAMPLES_SCHEMA)))
        except (pl.exceptions.PolarsError, OSError) as error:
            missing.append(f"{file.name} cannot be read: {error}")
    return pl.concat(frames) if frames else pl.DataFrame(schema=SAMPLES_SCHEMA)
