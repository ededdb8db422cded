"""Collectives matched across ranks: who arrived when, what was wait and what was transfer.

Algorithm and bus bandwidth are those of nccl-tests: the size is the full buffer (the input of a
reduce-scatter, the output of an all-gather), the time is what the operation takes once everybody
is there, and the bus factor is 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter and
all-to-all, 1 for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from kansoku.model.run import RunFacts
from kansoku.trace.clocks import ClockModel
from kansoku.trace.layout import group_keys

__all__ = ["CollectiveSummary", "arrivals", "bus_factor", "collective_rows", "summarise"]

# Names by torch, Gloo, NCCL and c10d for one operation.
_OPERATIONS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
# Operations that nobody can leave before everybody has come.
_SYNCHRONOUS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSummary:
    """All collectives of one operation in one process group."""

    group: str
    description: str | None
    op: str
    members: int
    """Ranks of the group; where they are not known, those seen in these collectives."""
    count: int
    """Collectives, each counted once however many ranks took part."""
    bytes: int | None
    """Sum over those collectives; None where no rank could tell."""
    transfer_ns: int | None
    """Time from the last arrival to the end, summed."""
    wait_ns: int | None
    """Time from own arrival to the last arrival, summed over members."""
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    wait_ratio: float | None
    """Share of the members' time in these collectives that they waited for the last one."""


def bus_factor(op: str, members: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if op == "all_reduce":
        return 2 * (members - 1) / members
    if op in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (members - 1) / members
    return 1.0


def collective_rows(spans: pl.DataFrame, facts: RunFacts) -> pl.DataFrame:
    """Return collectives with a run-wide group key, one name per operation, and ``end_ns``.

    A collective starts when its rank issues it and ends when it completes, on whatever thread.
    Where nobody saw it complete (on a device, say), ``untimed`` is true and the end is that of
    issuing it.
    """
    # Columns first: a filter copies what it keeps.
    columns = ("rank", "step", "group", "sequence", "name", "start_ns", "duration_ns", "bytes")
    untimed = pl.col("attributes").str.contains('"no_times":true', literal=True)
    untimed = untimed.fill_null(value=False)
    rows = spans.select(*columns, "dtype", "thread", "id", "kind", untimed=untimed).filter(
        (pl.col("kind") == "collective") & pl.col("rank").is_not_null()
    )
    keys = group_keys(facts)
    renamed = {pair: key for pair, key in keys.items() if pair[1] != key}
    if renamed:
        table = pl.DataFrame(
            {
                "rank": [rank for rank, _ in renamed],
                "group": [group for _, group in renamed],
                "key": list(renamed.values()),
            },
            schema={"rank": pl.Int32, "group": pl.String, "key": pl.String},
        )
        rows = (
            rows.join(table, on=["rank", "group"], how="left", maintain_order="left")
            .with_columns(group=pl.coalesce("key", "group"))
            .drop("key")
        )
    return rows.select(
        "rank",
        "step",
        "group",
        "sequence",
        op=pl.col("name").replace(dict(_OPERATIONS)),
        start_ns="start_ns",
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        bytes="bytes",
        dtype="dtype",
        thread="thread",
        id="id",
        untimed="untimed",
    )


def arrivals(rows: pl.DataFrame, clocks: ClockModel | None = None) -> pl.DataFrame:
    """Return each rank's part in synchronous collectives of two or more ranks: who came when.

    Columns added: ``arrival_ns`` and ``finish_ns`` on the reference clock, ``first_ns`` and
    ``last_ns`` (first and last arrival), ``seen`` (members matched), ``wait_ns`` (last arrival
    minus own), ``late_ns`` (own arrival minus first). Open collectives and untimed ones have a null
    end and finish.
    """
    rows = rows.filter(
        pl.col("op").is_in(list(_SYNCHRONOUS))
        & pl.col("group").is_not_null()
        & pl.col("sequence").is_not_null()
    )
    start, end = pl.col("start_ns"), pl.col("end_ns")
    if clocks is not None:
        start, end = clocks.corrected("start_ns"), clocks.corrected("end_ns")
    timed = ~pl.col("untimed")
    rows = rows.select(
        "rank",
        "step",
        "group",
        "sequence",
        "op",
        "bytes",
        arrival_ns=start,
        end_ns=pl.when(timed).then("end_ns"),
        finish_ns=pl.when(timed).then(end),
        # Group names repeat millions of times: numbered once, matching compares integers.
        group_number=pl.col("group").cast(pl.Categorical).to_physical(),
    )
    matched = rows.group_by("group_number", "sequence").agg(
        first_ns=pl.col("arrival_ns").min(),
        last_ns=pl.col("arrival_ns").max(),
        seen=pl.len().cast(pl.Int32),
    )
    return (
        rows.join(matched, on=["group_number", "sequence"], how="left", maintain_order="left")
        .filter(pl.col("seen") > 1)
        .with_columns(
            wait_ns=pl.col("last_ns") - pl.col("arrival_ns"),
            late_ns=pl.col("arrival_ns") - pl.col("first_ns"),
        )
        .drop("group_number")
    )


def summarise(
    rows: pl.DataFrame, matched: pl.DataFrame, facts: RunFacts
) -> tuple[CollectiveSummary, ...]:
    """Return one summary per process group and operation, largest traffic first."""
    described = {}
    keys = group_keys(facts)
    size: dict[str, int] = {}
    for rank in facts.ranks:
        for group in rank.groups:
            key = keys.get((rank.rank if rank.rank is not None else -1, group.name), group.name)
            described[key] = group.description if group.ranks else "members unknown"
            size[key] = len(group.ranks)
    # Counted at the member that saw most: a rank may have joined late or lost records.
    per_rank = rows.group_by("group", "op", "rank").agg(
        count=pl.len(), bytes=pl.col("bytes").sum(), known=pl.col("bytes").count()
    )
    totals = per_rank.group_by("group", "op").agg(
        count=pl.col("count").max(),
        bytes=pl.col("bytes").max(),
        known=pl.col("known").max(),
        ranks=pl.col("rank").n_unique(),
    )
    closed = matched.filter(pl.col("finish_ns").is_not_null())
    # The last to finish ends the operation; who came last saw transfer alone.
    timed = (
        closed.group_by("group", "op", "sequence")
        .agg(
            transfer=(pl.col("finish_ns") - pl.col("last_ns")).clip(lower_bound=0).median(),
            bytes=pl.col("bytes").max(),
            wait=pl.min_horizontal("wait_ns", pl.col("finish_ns") - pl.col("arrival_ns"))
            .clip(lower_bound=0)
            .sum(),
            own=(pl.col("finish_ns") - pl.col("arrival_ns")).clip(lower_bound=0).sum(),
        )
        .group_by("group", "op")
        .agg(
            transfer=pl.col("transfer").sum(),
            timed_bytes=pl.col("bytes").sum(),
            wait=pl.col("wait").sum(),
            own=pl.col("own").sum(),
        )
    )
    table = totals.join(timed, on=["group", "op"], how="left", nulls_equal=True)
    found = []
    for row in table.iter_rows(named=True):
        members = size.get(row["group"] or "") or row["ranks"]
        transfer = row["transfer"]
        bandwidth = (
            row["timed_bytes"] / (transfer * 1e-9) if transfer and row["timed_bytes"] else None
        )
        found.append(
            CollectiveSummary(
                group=row["group"] or "unknown",
                description=described.get(row["group"] or ""),
                op=row["op"],
                members=members,
                count=row["count"],
                bytes=row["bytes"] if row["known"] else None,
                transfer_ns=None if transfer is None else round(transfer),
                wait_ns=row["wait"],
                algbw_bytes_per_s=bandwidth,
                busbw_bytes_per_s=(
                    None if bandwidth is None else bandwidth * bus_factor(row["op"], members)
                ),
                wait_ratio=row["wait"] / row["own"] if row["own"] else None,
            )
        )
    return tuple(sorted(found, key=lambda s: (-(s.bytes or 0), -s.count, s.group, s.op)))
