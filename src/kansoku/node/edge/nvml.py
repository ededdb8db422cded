"""NVML behind plain values: what a GPU does not offer is asked once and then left alone."""

from typing import Any

from kansoku.errors import PlatformError
from kansoku.node.edge._nvml_api import NvmlApi, NvmlError

__all__ = ["FieldKey", "GpuLostError", "NvmlLibrary"]

FieldKey = int | tuple[int, int]
"""Field id, or (field id, scope): scope is a link number, or ALL_LINKS."""

ALL_LINKS = 0xFFFFFFFF
# NVML_VALUE_TYPE_*: which member of the union holds the number.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class GpuLostError(Exception):
    """The driver no longer reaches this GPU (Xid 79 and the like)."""


# NVML_ERROR_NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NO_PERMISSION,
# ARGUMENT_VERSION_MISMATCH: this GPU, driver or library does not have it, for good.
_FOR_GOOD = frozenset({3, 13, 2, 4, 25})
_LOST = frozenset({15, 16})  # GPU_IS_LOST, RESET_REQUIRED


class NvmlLibrary:
    """The library ``libnvidia-ml.so.1``, loaded once, with its handles."""

    def __init__(self) -> None:
        try:
            self.api = NvmlApi()
        except NvmlError as error:
            raise PlatformError(f"NVML: {error}") from None
        self._unsupported: set[tuple[object, ...]] = set()
        self._gpm_before: dict[int, Any] = {}
        self._gpm_now: dict[int, Any] = {}

    def handles(self) -> list[Any]:
        """Return a handle for each GPU, None for one that cannot be opened any more."""
        found: list[Any] = []
        for index in range(self.api.count()):
            try:
                found.append(self.api.handle(index))
            except NvmlError:
                found.append(None)
        return found

    def ask(self, gpu: int, function: str, *arguments: Any) -> Any:
        """Call an NVML function; None where it is not offered. Raise GpuLostError.

        ``gpu`` and the arguments beyond the handle make the memory of what is not offered.
        """
        key = (gpu, function, *arguments[1:])
        if key in self._unsupported:
            return None
        try:
            return self.api.ask(function, *arguments)
        except NvmlError as error:
            if error.value in _LOST:
                raise GpuLostError from error
            if error.value in _FOR_GOOD:
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
            if value.nvmlReturn == 0 and value.valueType < len(_MEMBERS):
                found[key] = float(getattr(value.value, _MEMBERS[value.valueType]))
            elif value.nvmlReturn in _FOR_GOOD:
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
            now = self._gpm_now.get(gpu) or api.gpm_sample()
            self._gpm_now[gpu] = now
            api.gpm_read(handle, now)
            before = self._gpm_before.get(gpu)
            self._gpm_before[gpu], self._gpm_now[gpu] = now, before
            if before is None:
                return {}
            values = api.gpm_metrics(before, now, list(metrics))
        except NvmlError as error:
            if error.value in _FOR_GOOD:
                self._unsupported.add((gpu, "gpm"))
            return {}
        return {
            name: value
            for name, value in zip(metrics.values(), values, strict=True)
            if value is not None
        }

    def close(self) -> None:
        """Free the samples and unload."""
        for sample in [*self._gpm_before.values(), *self._gpm_now.values()]:
            if sample is not None:
                self.api.gpm_free(sample)
        self._gpm_before.clear()
        self._gpm_now.clear()
        self.api.close()
