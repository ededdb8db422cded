"""What NIC and RDMA counters mean, in which unit, how wide they are and which side saw it."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["EthtoolMatch", "RdmaCounter", "match_ethtool", "rdma_counter", "rdma_counters"]


def _rows(name: str) -> list[dict[str, str]]:
    text = (resources.files("kansoku.catalog") / "data" / name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaCounter:
    """One file under ``/sys/class/infiniband/DEV/ports/N/{counters,hw_counters}``."""

    folder: str
    name: str
    metric: str
    """Metric of the conventions, direction as last word; empty: ``kansoku.rdma.events``."""
    error_type: str
    side: str
    """``requester``, ``responder``, ``notification_point`` (receiver that marks),
    ``reaction_point`` (sender that slows down), ``port`` or ``both``."""
    factor: int
    """4 where the counter is in words of 4 bytes."""
    bits: int
    saturates: bool
    """True: stops at its limit; False: wraps."""
    meaning: str
    source: str


@cache
def rdma_counters() -> dict[tuple[str, str], RdmaCounter]:
    """Return every known RDMA counter by folder and file name."""
    return {
        (row["folder"], row["name"]): RdmaCounter(
            folder=row["folder"],
            name=row["name"],
            metric=row["metric"],
            error_type=row["error_type"],
            side=row["side"],
            factor=int(row["factor"]),
            bits=int(row["bits"]),
            saturates=row["at_limit"] == "saturates",
            meaning=row["meaning"],
            source=row["source"],
        )
        for row in _rows("rdma_counters.csv")
    }


def rdma_counter(folder: str, name: str) -> RdmaCounter | None:
    """Return what a counter means; None for one no source explains."""
    return rdma_counters().get((folder, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class EthtoolMatch:
    """What one ``ethtool -S`` counter of a driver is."""

    metric: str
    labels: tuple[tuple[str, str], ...]
    factor: float
    meaning: str


_DIRECTION = {"rx": "receive", "tx": "transmit"}
_LABEL_NAMES = {
    "cause": "kansoku.cause",
    "fec": "kansoku.fec",
    "error": "error.type",
    "severity": "kansoku.severity",
}


@cache
def _ethtool_rules() -> tuple[tuple[str, re.Pattern[str], dict[str, str]], ...]:
    return tuple(
        (row["driver"], re.compile(row["pattern"]), row) for row in _rows("ethtool_counters.csv")
    )


@cache
def match_ethtool(driver: str, counter: str) -> EthtoolMatch | None:
    """Return what a counter of this driver (``mlx5_core``, ``bnxt_en``, ``ice``) is, or None."""
    for family, pattern, row in _ethtool_rules():
        if not driver.startswith(family):
            continue
        found = pattern.fullmatch(counter)
        if found is None:
            continue
        labels: list[tuple[str, str]] = []
        for part in filter(None, row["labels"].split(";")):
            if part == "direction":
                labels.append(("network.io.direction", _DIRECTION[found["d"]]))
            elif part == "priority":
                labels.append(("kansoku.priority", found["p"]))
            elif part == "global":
                labels.append(("kansoku.priority", "global"))
            else:
                key, _, value = part.partition("=")
                labels.append((_LABEL_NAMES[key], value))
        return EthtoolMatch(
            metric=row["metric"],
            labels=tuple(sorted(labels)),
            factor=float(row["factor"]),
            meaning=row["meaning"],
        )
    return None
