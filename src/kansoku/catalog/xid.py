"""What NVIDIA's driver codes mean: Xid, SXid (NVSwitch), clock event bits, recovery actions.

Each row names its source; a code that is not in the table is unknown, never guessed.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kansoku.model import Domain

__all__ = ["Code", "clock_event_bits", "codes", "sxid", "xid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One driver code."""

    kind: str
    """``xid``, ``sxid``, ``ib_wc_status``, ``clock_event_bit`` or ``gpu_recovery_action``."""
    code: int
    mnemonic: str
    meaning: str
    responsibility: str
    """Such as ``app-first``, ``hardware-memory``, ``fabric-nvlink``, ``informational``."""
    fatal_to_job: str
    """``yes``, ``no``, ``potentially``, ``always``, ``depends`` or a sentence."""
    action: str
    """What experience suggests."""
    note: str
    """When to escalate, or how to read the line."""
    source: str

    @property
    def domain(self) -> Domain | None:
        """Where the cause lies; None where the code alone cannot tell."""
        kind = self.responsibility
        if kind == "app-first":
            return Domain.APPLICATION
        if kind.startswith(("hardware", "fabric-nv", "thermal")):
            return Domain.GPU_HARDWARE
        if kind.startswith("network"):
            return Domain.NETWORK
        return Domain.HOST if kind in {"driver-fw", "host-config"} else None

    @property
    def severity(self) -> str:
        """``error`` where jobs die of it, ``warning`` where they may, else ``info``."""
        if self.fatal_to_job.startswith(("yes", "always")):
            return "error"
        return "info" if self.fatal_to_job == "no" else "warning"


@cache
def codes() -> dict[tuple[str, int], Code]:
    """Return every code by kind and number."""
    file = resources.files("kansoku.catalog") / "data" / "xid.csv"
    return {
        (row["kind"], int(row["code"], 0)): Code(
            kind=row["kind"],
            code=int(row["code"], 0),
            mnemonic=row["mnemonic"],
            meaning=row["meaning"],
            responsibility=row["responsibility"],
            fatal_to_job=row["fatal_to_job"],
            action=row["suggested_action"],
            note=row["escalation_or_note"],
            source=row["source"],
        )
        for row in csv.DictReader(file.read_text("utf-8").splitlines())
    }


def xid(number: int) -> Code | None:
    """Return what an Xid means; None where no source names it."""
    return codes().get(("xid", number))


def sxid(number: int) -> Code | None:
    """Return what an SXid (NVSwitch) means; None where no source names it."""
    return codes().get(("sxid", number))


def clock_event_bits(mask: int) -> tuple[Code, ...]:
    """Return the reasons set in NVML's clock-event (throttle) bit mask."""
    return tuple(
        code for (kind, bit), code in codes().items() if kind == "clock_event_bit" and mask & bit
    )
