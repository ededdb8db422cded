"""Calibration of the planner: a few efficiencies per kind of GPU, fitted to measured points."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from kansoku.catalog.accelerators import accelerator
from kansoku.errors import ConfigurationError

__all__ = ["Calibration", "calibration", "calibrations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """At most eight constants of one kind of GPU."""

    gpu: str
    gemm_efficiency: float
    """Share of the dense 16-bit peak that large matrix products reach, 0-1."""
    gemm_fp8_efficiency: float
    """The same for FP8 products against the FP8 peak, 0-1."""
    attention_efficiency: float
    """Share of the 16-bit peak that the attention core's products reach, 0-1."""
    memory_efficiency: float
    """Share of the memory bandwidth that elementwise kernels reach, 0-1."""
    scale_up_efficiency: float
    """Share of the one-way NVLink rate that collectives reach, 0-1."""
    scale_out_efficiency: float
    """Share of the NIC's line rate that collectives reach, 0-1."""
    kernel_gap_s: float
    """Launch gap and tail of one kernel, seconds."""
    hop_latency_s: float
    """Time of one step of a collective between nodes, waiting for the slowest member included,
    seconds."""
    attention: str
    """Attention kernel behind the measured points: ``flash`` or ``unfused``."""
    overlap: bool
    """The measured software hides data-parallel and interleaved transfers behind compute."""
    measured: int
    """Points the constants were fitted to; 0 for constants taken from another GPU."""
    mean_error_ratio: float | None
    """Mean absolute error of the step time over those points."""
    source: str

    def constants(self) -> dict[str, float]:
        """Return the fitted constants by name."""
        names = [f.name for f in fields(self)][1:9]
        return {name: float(getattr(self, name)) for name in names}

    @classmethod
    def from_constants(
        cls, gpu: str, constants: Mapping[str, float], *, attention: str, source: str
    ) -> "Calibration":
        """Build a calibration around given constants, before any error is known."""
        return cls(
            gpu=gpu,
            attention=attention,
            overlap=attention == "flash",
            measured=0,
            mean_error_ratio=None,
            source=source,
            **constants,
        )


@cache
def calibrations() -> dict[str, Calibration]:
    """Return every calibration by accelerator name."""
    text = (resources.files("kansoku.catalog") / "data" / "calibration.toml").read_text("utf-8")
    rows = tomllib.loads(text)
    found = {}
    for name, row in rows.items():
        values = dict(row)
        parent = values.pop("same_as", None)
        if parent is not None:
            values = rows[parent] | {"measured": 0} | values
            values.pop("mean_error_ratio", None)
        values.setdefault("mean_error_ratio", None)
        found[name] = Calibration(gpu=accelerator(name).name, **values)
    return found


def calibration(gpu: str) -> Calibration:
    """Return the calibration of a GPU by any of its names; raise where nothing was measured."""
    name = accelerator(gpu).name
    try:
        return calibrations()[name]
    except KeyError:
        known = ", ".join(calibrations())
        raise ConfigurationError(
            f"no measured point of {name} is known, so its step time is not predicted",
            remedy=f"calibrated: {known}; memory and FLOPs need no calibration",
        ) from None
