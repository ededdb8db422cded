"""The part of NVML that the agent calls, by ctypes.

nvidia-ml-py is the field's binding, and the tests hold this one against it call by call. It is
not used here because importing its 600 structures takes 17 MB, a seventh of what a node agent may
have; see docs/decisions. Symbols and layouts are those of NVIDIA's NVML API reference.
"""

import ctypes
from ctypes import byref, c_char, c_double, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from typing import Any, ClassVar

__all__ = ["NvmlApi", "NvmlError"]

_TEXT_BYTES = 96
_MAX_PROCESSES = 256

NOT_FOUND, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 6, 12, 13
_NAMES = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    7: "Insufficient Size",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires reset",
    18: "Driver/library version mismatch",
    999: "Unknown Error",
}


class NvmlError(Exception):
    """NVML answered with ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(_NAMES.get(value, f"error {value}"))
        self.value = value


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Violation(ctypes.Structure):
    _fields_ = (("referenceTime", c_ulonglong), ("violationTime", c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("numbers", c_uint * 5),
        ("busId", c_char * 32),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class _Value(ctypes.Union):
    _fields_ = (
        ("dVal", c_double), ("uiVal", c_uint), ("ulVal", ctypes.c_ulong), ("ullVal", c_ulonglong),
        ("sllVal", c_longlong), ("siVal", c_int), ("usVal", ctypes.c_ushort),
    )  # fmt: skip


class _Field(ctypes.Structure):
    _fields_ = (
        ("fieldId", c_uint), ("scopeId", c_uint), ("timestamp", c_longlong),
        ("latencyUsec", c_longlong), ("valueType", c_uint), ("nvmlReturn", c_uint),
        ("value", _Value),
    )  # fmt: skip


class _GpmMetric(ctypes.Structure):
    _fields_ = (
        ("metricId", c_uint), ("nvmlReturn", c_uint), ("value", c_double),
        ("metricInfo", c_void_p * 3),
    )  # fmt: skip


class _GpmGet(ctypes.Structure):
    # NVML writes numMetrics entries only; the real array is longer and grows with each release.
    _fields_ = (
        ("version", c_uint), ("numMetrics", c_uint), ("sample1", c_void_p),
        ("sample2", c_void_p), ("metrics", _GpmMetric * 512),
    )  # fmt: skip


_Text = c_char * _TEXT_BYTES
# name: symbol, types of further arguments, types of what comes back
_CALLS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "UtilizationRates": ("", (), (_Rates,)),
    "EncoderUtilization": ("", (), (c_uint, c_uint)),
    "DecoderUtilization": ("", (), (c_uint, c_uint)),
    "JpgUtilization": ("", (), (c_uint, c_uint)),
    "OfaUtilization": ("", (), (c_uint, c_uint)),
    "MemoryInfo": ("", (), (_Memory,)),
    "PowerUsage": ("", (), (c_uint,)),
    "EnforcedPowerLimit": ("", (), (c_uint,)),
    "TotalEnergyConsumption": ("", (), (c_ulonglong,)),
    "Temperature": ("", (c_uint,), (c_uint,)),
    "TemperatureThreshold": ("", (c_uint,), (c_uint,)),
    "ClockInfo": ("", (c_uint,), (c_uint,)),
    "MaxClockInfo": ("", (c_uint,), (c_uint,)),
    "CurrentClocksEventReasons": ("", (), (c_ulonglong,)),
    "CurrentClocksThrottleReasons": ("", (), (c_ulonglong,)),
    "ViolationStatus": ("", (c_uint,), (_Violation,)),
    "TotalEccErrors": ("", (c_uint, c_uint), (c_ulonglong,)),
    "RemappedRows": ("", (), (c_uint, c_uint, c_uint, c_uint)),
    "PcieReplayCounter": ("", (), (c_uint,)),
    "CurrPcieLinkGeneration": ("", (), (c_uint,)),
    "MaxPcieLinkGeneration": ("", (), (c_uint,)),
    "CurrPcieLinkWidth": ("", (), (c_uint,)),
    "MaxPcieLinkWidth": ("", (), (c_uint,)),
    "NvLinkState": ("", (c_uint,), (c_uint,)),
    "NvLinkErrorCounter": ("", (c_uint, c_uint), (c_ulonglong,)),
    "MigMode": ("", (), (c_uint, c_uint)),
    "MaxMigDeviceCount": ("", (), (c_uint,)),
    "MigDeviceHandleByIndex": ("", (c_uint,), (c_void_p,)),
    "GpuInstanceId": ("", (), (c_uint,)),
    "PciInfo": ("nvmlDeviceGetPciInfo_v3", (), (_Pci,)),
}
_TEXTS = {"UUID", "Name", "Serial", "VbiosVersion"}
_PREFIX = "nvmlDeviceGet"


class NvmlApi:
    """The loaded library; methods are named as nvidia-ml-py names its functions."""

    NVML_SUCCESS: ClassVar[int] = 0
    NVMLError = NvmlError

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        """Load and initialise; raise NvmlError."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            raise NvmlError(LIBRARY_NOT_FOUND) from None
        self._call("nvmlInit_v2")

    def _call(self, symbol: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        code = function(*arguments)
        if code:
            raise NvmlError(code)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call ``nvml…`` by its name in nvidia-ml-py; raise NvmlError."""
        short = name.removeprefix(_PREFIX)
        if short in _TEXTS:
            return self._text(name, arguments[0])
        if name in {"nvmlDeviceGetFieldValues", "nvmlDeviceGetComputeRunningProcesses"}:
            return self._fields(*arguments) if "Field" in name else self._processes(*arguments)
        if name == "nvmlSystemGetDriverVersion":
            buffer = _Text()
            self._call(name, buffer, c_uint(_TEXT_BYTES))
            return buffer.value.decode("utf-8", "replace")
        symbol, kinds, answers = _CALLS[short]
        out = [kind() for kind in answers]
        given = [kind(a) for kind, a in zip(kinds, arguments[1:], strict=True)]
        self._call(symbol or name, arguments[0], *given, *(byref(o) for o in out))
        if len(out) == 1 and isinstance(out[0], ctypes.Structure):
            return out[0]
        if answers == (c_void_p,):
            return out[0]
        plain = tuple(o.value for o in out)
        return plain[0] if len(plain) == 1 else plain

    def _text(self, name: str, handle: Any) -> str:
        buffer = _Text()
        self._call(name, handle, buffer, c_uint(_TEXT_BYTES))
        return buffer.value.decode("utf-8", "replace")

    def count(self) -> int:
        """Return the number of GPUs."""
        number = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(number))
        return number.value

    def handle(self, index: int) -> Any:
        """Return the handle of a GPU."""
        handle = c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
        return handle

    def _fields(self, handle: Any, wanted: tuple[Any, ...]) -> Any:
        values = (_Field * len(wanted))()
        for value, key in zip(values, wanted, strict=True):
            value.fieldId, value.scopeId = key if isinstance(key, tuple) else (key, 0)
        self._call("nvmlDeviceGetFieldValues", handle, c_int(len(wanted)), values)
        return values

    def _processes(self, handle: Any) -> list[Any]:
        count = c_uint(_MAX_PROCESSES)
        found = (_Process * _MAX_PROCESSES)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(count), found)
        # all ones: "not available" (MIG, containers)
        processes = list(found[: count.value])
        for process in processes:
            process.known = process.usedGpuMemory != (1 << 64) - 1
        return processes

    def gpm_sample(self) -> Any:
        """Return room for a GPM sample."""
        sample = c_void_p()
        self._call("nvmlGpmSampleAlloc", byref(sample))
        return sample

    def gpm_read(self, handle: Any, sample: Any) -> None:
        """Fill a GPM sample."""
        self._call("nvmlGpmSampleGet", handle, sample)

    def gpm_metrics(self, before: Any, after: Any, numbers: list[int]) -> list[float | None]:
        """Return metrics between two samples; None for one that is not offered."""
        get = _GpmGet(version=1, numMetrics=len(numbers), sample1=before, sample2=after)
        for entry, number in zip(get.metrics, numbers, strict=False):
            entry.metricId = number
        self._call("nvmlGpmMetricsGet", byref(get))
        chosen = get.metrics[: len(numbers)]
        return [None if m.nvmlReturn else float(m.value) for m in chosen]

    def gpm_free(self, sample: Any) -> None:
        """Give a sample back."""
        self._call("nvmlGpmSampleFree", sample)

    def close(self) -> None:
        """End the use of the library."""
        self._call("nvmlShutdown")
