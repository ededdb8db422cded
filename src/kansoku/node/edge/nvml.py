"""NVML behind plain values: what a GPU does not offer is asked once and then left alone."""

from typing import Any

from kansoku.errors import DependencyError, PlatformError

__all__ = ["FieldKey", "GpuLostError", "NvmlLibrary"]

FieldKey = int | tuple[int, int]
"""Field id, or (field id, scope): scope is a link number, or ALL_LINKS."""

ALL_LINKS = 0xFFFFFFFF
# NVML_VALUE_TYPE_*: which member of the union holds the number.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class GpuLostError(Exception):
    """The driver no longer reaches this GPU (Xid 79 and the like)."""


class NvmlLibrary:
    """The library ``libnvidia-ml.so.1``, loaded once, with its handles."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise DependencyError.missing("the NVML collector", "nvidia-ml-py", "agent") from None
        self.api: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise PlatformError(f"NVML: {error}") from None
        self._unsupported: set[tuple[object, ...]] = set()
        self._gpm_before: dict[int, Any] = {}
        self._gpm_now: dict[int, Any] = {}
        self.calls = 0
        # These mean "this GPU, driver or library does not have it", for good.
        self._for_good = {
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        }

    def handles(self) -> list[Any]:
        """Return a handle for each GPU, None for one that cannot be opened any more."""
        found: list[Any] = []
        for index in range(self.api.nvmlDeviceGetCount()):
            try:
                found.append(self.api.nvmlDeviceGetHandleByIndex(index))
            except self.api.NVMLError:
                found.append(None)
        return found

    def ask(self, gpu: int, function: str, *arguments: Any) -> Any:
        """Call an NVML function; None where it is not offered. Raise GpuLostError.

        ``gpu`` and the arguments beyond the handle make the memory of what is not offered.
        """
        key = (gpu, function, *arguments[1:])
        if key in self._unsupported:
            return None
        self.calls += 1
        try:
            return getattr(self.api, function)(*arguments)
        except self.api.NVMLError as error:
            if error.value in (self.api.NVML_ERROR_GPU_IS_LOST, self.api.NVML_ERROR_RESET_REQUIRED):
                raise GpuLostError from error
            if error.value in self._for_good:
                self._unsupported.add(key)
            return None
        except AttributeError:  # an older nvidia-ml-py
            self._unsupported.add(key)
            return None

    def fields(self, gpu: int, handle: Any, wanted: list[FieldKey]) -> dict[FieldKey, float]:
        """Return the field values that this GPU has, in one call."""
        asked = [key for key in wanted if (gpu, "field", key) not in self._unsupported]
        if not asked:
            return {}
        values = self.ask(gpu, "nvmlDeviceGetFieldValues", handle, tuple(asked))
        found: dict[FieldKey, float] = {}
        for key, value in zip(asked, values or (), strict=False):
            if value.nvmlReturn == self.api.NVML_SUCCESS and value.valueType < len(_MEMBERS):
                found[key] = float(getattr(value.value, _MEMBERS[value.valueType]))
            elif value.nvmlReturn in self._for_good:
                self._unsupported.add((gpu, "field", key))
        return found

    def activity(self, gpu: int, handle: Any, metrics: dict[int, str]) -> dict[str, float]:
        """Return GPM metrics (0-100) over the time since the last call; empty at the first.

        Hopper and later; others answer "not supported" once.
        """
        if (gpu, "gpm") in self._unsupported:
            return {}
        api = self.api
        try:
            now = self._gpm_now.get(gpu) or api.nvmlGpmSampleAlloc()
            self._gpm_now[gpu] = now
            api.nvmlGpmSampleGet(handle, now)
            before = self._gpm_before.get(gpu)
            self._gpm_before[gpu], self._gpm_now[gpu] = now, before
            if before is None:
                return {}
            get = api.c_nvmlGpmMetricsGet_t()
            get.version = api.NVML_GPM_METRICS_GET_VERSION
            get.numMetrics = len(metrics)
            get.sample1, get.sample2 = before, now
            for position, number in enumerate(metrics):
                get.metrics[position].metricId = number
            api.nvmlGpmMetricsGet(get)
            self.calls += 2
        except api.NVMLError as error:
            if error.value in self._for_good:
                self._unsupported.add((gpu, "gpm"))
            return {}
        return {
            name: float(get.metrics[position].value)
            for position, name in enumerate(metrics.values())
            if get.metrics[position].nvmlReturn == api.NVML_SUCCESS
        }

    def close(self) -> None:
        """Free the samples and unload."""
        for sample in [*self._gpm_before.values(), *self._gpm_now.values()]:
            if sample is not None:
                self.api.nvmlGpmSampleFree(sample)
        self._gpm_before.clear()
        self._gpm_now.clear()
        self.api.nvmlShutdown()
