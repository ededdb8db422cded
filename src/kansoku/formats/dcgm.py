"""Text of NVIDIA's DCGM exporter to GPU readings.

Known traps, handled here: fields were renamed between releases (both names are read, the newer
wins), sentinels such as 9223372036854775794 or 2147483632 mean "no value", and some rates carry
``# TYPE … counter`` although they are gauges (PROF_PCIE_*_BYTES, PROF_NVLINK_*_BYTES): the table
below says what each field is, the exporter's own word is not trusted.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FIELDS", "DcgmField", "DcgmReading", "is_sentinel", "parse_dcgm", "parse_exposition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmField:
    """How one DCGM field becomes a metric of the catalogue."""

    names: tuple[str, ...]
    """Newest first, without the ``DCGM_FI_`` prefix."""
    metric: str
    labels: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0
    is_rate: bool = False
    """A rate per second that the exporter labels as a counter; kept under kansoku.dcgm.rate."""


def _errors(*names: str, kind: str) -> DcgmField:
    return DcgmField(names=names, metric="hw.errors", labels=(("error.type", kind),))


def _activity(unit: str, *names: str) -> DcgmField:
    labels = (("kansoku.gpu.unit", unit),)
    return DcgmField(names=names, metric="kansoku.gpu.activity", labels=labels)


def _throttle(reason: str, *names: str, factor: float = 1e-9) -> DcgmField:
    return DcgmField(
        names=names,
        metric="kansoku.gpu.throttle.time",
        labels=(("kansoku.gpu.reason", reason),),
        factor=factor,
    )


_MIB = 1048576.0
_GENERAL = (("hw.gpu.task", "general"),)
FIELDS: tuple[DcgmField, ...] = (
    DcgmField(
        names=("DEV_GPU_UTIL",), metric="hw.gpu.utilization", labels=_GENERAL, factor=0.01
    ),
    DcgmField(
        names=("DEV_ENC_UTIL",),
        metric="hw.gpu.utilization",
        labels=(("hw.gpu.task", "encoder"),),
        factor=0.01,
    ),
    DcgmField(
        names=("DEV_DEC_UTIL",),
        metric="hw.gpu.utilization",
        labels=(("hw.gpu.task", "decoder"),),
        factor=0.01,
    ),
    DcgmField(
        names=("DEV_MEM_COPY_UTIL",),
        metric="kansoku.gpu.memory.controller.utilization",
        factor=0.01,
    ),
    DcgmField(names=("DEV_FB_USED",), metric="hw.gpu.memory.usage", factor=_MIB),
    DcgmField(names=("DEV_FB_TOTAL",), metric="hw.gpu.memory.limit", factor=_MIB),
    DcgmField(
        names=("DEV_POWER_USAGE", "DEV_POWER_USAGE_INSTANT", "DEV_BOARD_POWER"), metric="hw.power"
    ),
    DcgmField(names=("DEV_TOTAL_ENERGY_CONSUMPTION",), metric="hw.energy", factor=1e-3),
    DcgmField(
        names=("DEV_GPU_TEMP",), metric="hw.temperature", labels=(("hw.sensor_location", "core"),)
    ),
    DcgmField(
        names=("DEV_MEMORY_TEMP",),
        metric="hw.temperature",
        labels=(("hw.sensor_location", "memory"),),
    ),
    DcgmField(
        names=("DEV_SM_CLOCK",),
        metric="kansoku.gpu.clock.frequency",
        labels=(("kansoku.gpu.clock", "sm"),),
        factor=1e6,
    ),
    DcgmField(
        names=("DEV_MEM_CLOCK",),
        metric="kansoku.gpu.clock.frequency",
        labels=(("kansoku.gpu.clock", "memory"),),
        factor=1e6,
    ),
    DcgmField(
        names=("DEV_POWER_MGMT_LIMIT", "DEV_ENFORCED_POWER_LIMIT"),
        metric="kansoku.gpu.power.limit",
    ),
    DcgmField(names=("DEV_XID_ERRORS",), metric="kansoku.gpu.xid"),
    DcgmField(
        names=("DEV_PCIE_REPLAY_COUNTER",),
        metric="hw.errors",
        labels=(("error.type", "pcie_replay"),),
    ),
    _errors("DEV_ECC_SBE_VOL_TOTAL", kind="ecc_corrected"),
    _errors("DEV_ECC_DBE_VOL_TOTAL", kind="ecc_uncorrected"),
    DcgmField(
        names=("DEV_UNCORRECTABLE_REMAPPED_ROWS",),
        metric="kansoku.gpu.rows.remapped",
        labels=(("error.type", "uncorrectable"),),
    ),
    DcgmField(
        names=("DEV_CORRECTABLE_REMAPPED_ROWS",),
        metric="kansoku.gpu.rows.remapped",
        labels=(("error.type", "correctable"),),
    ),
    DcgmField(names=("DEV_ROW_REMAP_PENDING",), metric="kansoku.gpu.rows.pending"),
    DcgmField(names=("DEV_ROW_REMAP_FAILURE",), metric="kansoku.gpu.rows.failed"),
    _throttle("power", "DEV_POWER_VIOLATION"),
    _throttle("thermal", "DEV_THERMAL_VIOLATION"),
    _throttle("sync_boost", "DEV_SYNC_BOOST_VIOLATION"),
    _throttle("board_limit", "DEV_BOARD_LIMIT_VIOLATION"),
    _throttle("low_utilization", "DEV_LOW_UTIL_VIOLATION"),
    _throttle("reliability", "DEV_RELIABILITY_VIOLATION"),
    _activity("graphics", "PROF_GR_ENGINE_ACTIVE"),
    _activity("sm", "PROF_SM_ACTIVE"),
    _activity("sm_occupancy", "PROF_SM_OCCUPANCY"),
    _activity("tensor", "PROF_PIPE_TENSOR_ACTIVE"),
    _activity("dram", "PROF_DRAM_ACTIVE"),
    _activity("fp64", "PROF_PIPE_FP64_ACTIVE"),
    _activity("fp32", "PROF_PIPE_FP32_ACTIVE"),
    _activity("fp16", "PROF_PIPE_FP16_ACTIVE"),
    *(
        DcgmField(
            names=(name,),
            metric="kansoku.dcgm.rate",
            labels=(("kansoku.dcgm.field", name.lower()),),
            is_rate=True,
        )
        for name in (
            "PROF_PCIE_TX_BYTES", "PROF_PCIE_RX_BYTES", "PROF_NVLINK_TX_BYTES",
            "PROF_NVLINK_RX_BYTES",
        )
    ),
    *(
        DcgmField(
            names=names,
            metric="kansoku.gpu.nvlink.errors",
            labels=(("error.type", kind), ("kansoku.nvlink", "all")),
        )
        for kind, names in (
            ("crc_flit", ("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",)),
            ("crc_data", ("DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",)),
            ("replay", ("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",)),
            ("recovery", ("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",)),
        )
    ),
)  # fmt: skip

# Old exporters (before 2.0) wrote other names altogether.
_OLD_NAMES = {
    "dcgm_gpu_utilization": "DEV_GPU_UTIL",
    "dcgm_mem_copy_utilization": "DEV_MEM_COPY_UTIL",
    "dcgm_enc_utilization": "DEV_ENC_UTIL",
    "dcgm_dec_utilization": "DEV_DEC_UTIL",
    "dcgm_fb_used": "DEV_FB_USED",
    "dcgm_power_usage": "DEV_POWER_USAGE",
    "dcgm_total_energy_consumption": "DEV_TOTAL_ENERGY_CONSUMPTION",
    "dcgm_gpu_temp": "DEV_GPU_TEMP",
    "dcgm_memory_temp": "DEV_MEMORY_TEMP",
    "dcgm_sm_clock": "DEV_SM_CLOCK",
    "dcgm_memory_clock": "DEV_MEM_CLOCK",
    "dcgm_xid_errors": "DEV_XID_ERRORS",
    "dcgm_pcie_replay_counter": "DEV_PCIE_REPLAY_COUNTER",
    "dcgm_ecc_sbe_volatile_total": "DEV_ECC_SBE_VOL_TOTAL",
    "dcgm_ecc_dbe_volatile_total": "DEV_ECC_DBE_VOL_TOTAL",
    "dcgm_power_violation": "DEV_POWER_VIOLATION",
    "dcgm_thermal_violation": "DEV_THERMAL_VIOLATION",
    "dcgm_sync_boost_violation": "DEV_SYNC_BOOST_VIOLATION",
    "dcgm_board_limit_violation": "DEV_BOARD_LIMIT_VIOLATION",
    "dcgm_low_util_violation": "DEV_LOW_UTIL_VIOLATION",
    "dcgm_reliability_violation": "DEV_RELIABILITY_VIOLATION",
}
# dcgm_fields.h: blank values of 32-bit, 64-bit and floating fields, and their "not found", "not
# supported", "not permissioned" variants, 1 to 5 above.
_BLANKS = ((0x7FFFFFF0, 0x7FFFFFFF), (0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFFF), (2**47, 2**47 + 15))
_NO_XID = 0.0


def is_sentinel(value: float) -> bool:
    """Say whether DCGM wrote a blank rather than a number."""
    if not math.isfinite(value):
        return True
    # As a float, the 64-bit blanks all round to 2**63.
    return any(low <= value <= high or value == float(high) for low, high in _BLANKS)


_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>[^\n]*)\})?\s+(?P<value>[^\s]+)"
    r"(?:\s+-?[0-9]+)?\s*"
)
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")


def _labels(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            return None
        found[match[1]] = _ESCAPE.sub(lambda m: {"n": "\n"}.get(m[1], m[1]), match[2])
        position = match.end()
    return found


def parse_exposition(text: str) -> Iterator[tuple[str, dict[str, str], float] | None]:
    """Yield (name, labels, value) of Prometheus text, and None for a line that makes no sense."""
    for line in text.split("\n"):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        labels = _labels(match["labels"] or "") if match else None
        try:
            value = float(match["value"]) if match else math.nan
        except ValueError:
            match = None
        if match is None or labels is None:
            yield None
        else:
            yield match["name"], labels, value


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmReading:
    """One value of one GPU (or MIG instance)."""

    field: DcgmField
    gpu: str
    """Index on the node."""
    uuid: str
    mig: str | None
    """MIG instance id; None for the whole GPU."""
    value: float
    """In the unit of the catalogue's metric."""


def parse_dcgm(text: str) -> tuple[list[DcgmReading], int, int]:
    """Return readings, how many values were sentinels, and how many lines were bad."""
    by_name = {name: (field, rank) for field in FIELDS for rank, name in enumerate(field.names)}
    best: dict[tuple[int, str, str | None], tuple[int, DcgmReading]] = {}
    blanks = bad = 0
    for line in parse_exposition(text):
        if line is None:
            bad += 1
            continue
        name, labels, value = line
        short = _OLD_NAMES.get(name, name.removeprefix("DCGM_FI_"))
        if short not in by_name or "gpu" not in labels:
            continue
        field, rank = by_name[short]
        if is_sentinel(value) or (field.metric == "kansoku.gpu.xid" and value == _NO_XID):
            blanks += is_sentinel(value)
            continue
        mig = labels.get("GPU_I_ID") or None
        reading = DcgmReading(
            field=field,
            gpu=labels["gpu"],
            uuid=labels.get("UUID") or labels.get("uuid") or f"gpu{labels['gpu']}",
            mig=mig,
            value=value * field.factor,
        )
        key = (id(field), reading.gpu, mig)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, reading)
    return [reading for _, reading in best.values()], blanks, bad
