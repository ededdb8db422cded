"""What phases cost in CPU time, memory and, where telemetry has it, energy and network."""

from dataclasses import dataclass

import polars as pl

from kansoku.app.report._load import LoadedRun

__all__ = ["PhaseResources", "phase_resources"]

_KINDS = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "evaluation", "gc")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResources:
    """One kind of span over all ranks; spans inside it (nested phases) are included."""

    kind: str
    count: int
    wall_ns: int
    cpu_ns: int | None
    """CPU time of the thread inside; None where not recorded."""
    peak_rss_bytes: int | None
    """Highest resident memory seen at the end of one."""
    device_ns: int | None
    """Time on the device, where events were recorded."""


def phase_resources(run: LoadedRun) -> tuple[PhaseResources, ...]:
    """Return the resources of every kind of phase recorded."""
    rows = (
        run.spans.lazy()
        .filter(pl.col("kind").is_in(_KINDS) & pl.col("duration_ns").is_not_null())
        .group_by("kind")
        .agg(
            count=pl.len(),
            wall=pl.col("duration_ns").sum(),
            cpu=pl.col("cpu_ns").sum(),
            known=pl.col("cpu_ns").count(),
        )
        .collect()
    )
    extra: dict[str, tuple[int | None, int | None]] = {}
    if run.resources is not None:
        extra = {
            kind: (rss, device)
            for kind, rss, device in run.resources.group_by("kind")
            .agg(
                pl.col("peak_rss_bytes").max(),
                pl.when(pl.col("device_ns").count() > 0).then(pl.col("device_ns").sum()),
            )
            .iter_rows()
        }
    found = {
        row["kind"]: PhaseResources(
            kind=row["kind"],
            count=row["count"],
            wall_ns=row["wall"],
            cpu_ns=row["cpu"] if row["known"] else None,
            peak_rss_bytes=extra.get(row["kind"], (None, None))[0],
            device_ns=extra.get(row["kind"], (None, None))[1],
        )
        for row in rows.iter_rows(named=True)
    }
    return tuple(found[kind] for kind in _KINDS if kind in found)
