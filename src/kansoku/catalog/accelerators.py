"""Accelerators: dense peaks, memory and scale-up bandwidth, each with its source."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kansoku.errors import InputError

__all__ = ["Accelerator", "accelerator", "accelerators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of GPU."""

    name: str
    title: str
    aliases: tuple[str, ...]
    """Names that drivers, Slurm and people use, lower case."""
    peak_flops: dict[str, float]
    """Precision (``bf16``, ``fp16``, ``fp8``, ``fp4``) to dense peak, FLOP/s."""
    memory_bytes: int
    memory_bytes_per_s: float
    scale_up_bytes_per_s: float
    """NVLink and the like, both directions together."""
    source: str

    def peak(self, precision: str) -> float:
        """Return the dense peak in FLOP/s; raise InputError where none is published."""
        try:
            return self.peak_flops[precision]
        except KeyError:
            known = ", ".join(self.peak_flops)
            raise InputError(
                f"no published dense {precision} peak of {self.title}; known: {known}"
            ) from None


@cache
def accelerators() -> dict[str, Accelerator]:
    """Return every accelerator of the catalogue by name."""
    text = (Path(__file__).parent / "data" / "accelerators.toml").read_text("utf-8")
    return {
        name: Accelerator(
            name=name,
            title=row["title"],
            aliases=tuple(row["aliases"]),
            peak_flops={
                key.removesuffix("_tflops"): value * 1e12
                for key, value in row.items()
                if key.endswith("_tflops")
            },
            memory_bytes=round(row["memory_gb"] * 1e9),
            memory_bytes_per_s=row["memory_gb_per_s"] * 1e9,
            scale_up_bytes_per_s=row["scale_up_gb_per_s"] * 1e9,
            source=row["source"],
        )
        for name, row in tomllib.loads(text).items()
    }


def accelerator(name: str) -> Accelerator:
    """Find an accelerator by name or alias, any case; raise InputError with the known names."""
    wanted = name.strip().lower()
    for entry in accelerators().values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    raise InputError(
        f"unknown accelerator {name!r}: no peak is guessed",
        remedy=f"known: {', '.join(accelerators())}",
    )
