# ruff: noqa: B023
"""Runs generated from a known schedule: what every rank did is decided here, to the nanosecond.

``generate`` moves all ranks of a data-parallel (× tensor-parallel) job through their steps: each
works, arrives at a collective, waits for the last member, transfers, goes on. Times are on one
true clock; ``with_clocks`` then gives each rank a clock of its own.
"""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kansoku.model import ProcessGroup, RankFacts, RunFacts, table_schema

MS = 1_000_000
START_NS = 1_767_225_600_000_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    ranks: int = 4
    tensor_parallel: int = 1
    steps: int = 60
    # Work of one step, ns.
    data_wait_ns: int = 2 * MS
    forward_ns: int = 15 * MS
    backward_ns: int = 30 * MS
    optimizer_ns: int = 3 * MS
    other_ns: int = 1 * MS
    forward_collectives: int = 0
    backward_collectives: int = 4
    transfer_ns: int = 500_000
    bytes: int = 4 << 20
    jitter: float = 0.02
    seed: int = 1
    # (rank, phase) -> factor on that phase's work
    slow: dict[tuple[int, str], float] = field(default_factory=dict)
    # Extra ns in forward of rank (step % ranks): nobody's fault.
    rotating_ns: int = 0


class _Writer:
    def __init__(self):
        self.columns = {
            name: []
            for name in (
                "rank",
                "step",
                "kind",
                "start",
                "duration",
                "id",
                "parent",
                "group",
                "sequence",
            )
        }

    def add(self, ranks, step, kind, start, end, ids, parent, *, group=None, sequence=None):
        n = len(ranks)
        c = self.columns
        c["rank"].append(ranks)
        c["step"].append(np.full(n, step, dtype=np.int32))
        c["kind"].append(np.full(n, kind, dtype=np.int8))
        c["start"].append(start.astype(np.int64))
        c["duration"].append((end - start).astype(np.int64))
        c["id"].append(ids)
        c["parent"].append(parent)
        c["group"].append(np.full(n, -1, dtype=np.int32) if group is None else group)
        c["sequence"].append(np.full(n, -1 if sequence is None else sequence, dtype=np.int64))


KINDS = ["step", "data_wait", "forward", "backward", "optimizer", "collective"]


def generate(
    schedule: Schedule, *, spans_every: int = 1
) -> tuple[RunFacts, pl.DataFrame, pl.DataFrame]:
    """Return facts, spans (of every ``spans_every``-th step) and the true step rows."""
    s = schedule
    rng = np.random.default_rng(s.seed)
    ranks = np.arange(s.ranks, dtype=np.int32)
    tp = s.tensor_parallel
    tp_group, dp_group = ranks // tp, ranks % tp
    n_tp = s.ranks // tp

    def work(phase, amount):
        factor = np.array([s.slow.get((int(r), phase), 1.0) for r in ranks]) if s.slow else 1.0
        noise = 1 + s.jitter * np.abs(rng.standard_normal(s.ranks))
        return (amount * factor * noise).astype(np.int64)

    now = np.full(s.ranks, START_NS, dtype=np.int64)
    next_id = np.ones(s.ranks, dtype=np.int64)
    writer = _Writer()
    truth = []
    seq = {"tp": 0, "dp": 0}

    def take():
        ids = next_id.copy()
        next_id[:] += 1
        return ids

    none = np.full(s.ranks, -1, dtype=np.int64)
    for step in range(s.steps):
        keep = step % spans_every == 0
        begin = now.copy()
        step_id = take()
        booked = {k: np.zeros(s.ranks, dtype=np.int64) for k in KINDS[1:]}

        def phase(name, amount, collectives, kind):
            nonlocal now
            start = now.copy()
            me = take()
            extra = np.where(ranks == step % s.ranks, s.rotating_ns, 0) if name == "forward" else 0
            total = work(name, amount) + extra
            pieces = max(collectives, 1)
            waited = np.zeros(s.ranks, dtype=np.int64)
            for piece in range(pieces):
                now = now + (
                    total // pieces
                    if piece < pieces - 1
                    else total - (pieces - 1) * (total // pieces)
                )
                if collectives:
                    arrive = now.copy()
                    group, count = (tp_group, n_tp) if kind == "tp" else (dp_group, tp)
                    last = np.zeros(count, dtype=np.int64)
                    np.maximum.at(last, group, arrive)
                    now = last[group] + s.transfer_ns
                    waited += now - arrive
                    if keep:
                        base = 1000 if kind == "tp" else 0
                        writer.add(
                            ranks,
                            step,
                            5,
                            arrive,
                            now,
                            take(),
                            me,
                            group=base + group,
                            sequence=seq[kind],
                        )
                    seq[kind] += 1
            if keep:
                writer.add(ranks, step, KINDS.index(name), start, now, me, step_id)
            booked[name] += now - start - waited
            booked["collective"] += waited

        phase("data_wait", s.data_wait_ns, 0, "")
        phase("forward", s.forward_ns, s.forward_collectives, "tp" if tp > 1 else "dp")
        phase("backward", s.backward_ns, s.backward_collectives, "dp")
        phase("optimizer", s.optimizer_ns, 0, "")
        now = now + s.other_ns
        if keep:
            writer.add(ranks, step, 0, begin, now, step_id, none)
        truth.append(
            pl.DataFrame(
                {
                    "rank": ranks,
                    "step": np.full(s.ranks, step, dtype=np.int32),
                    "start_ns": begin,
                    "duration_ns": now - begin,
                    **{f"{k}_ns": v for k, v in booked.items()},
                    "checkpoint_ns": none + 1,
                    "other_ns": np.full(s.ranks, s.other_ns),
                }
            )
        )
    return _facts(s, tp_group, dp_group, int(now.max())), _frame(writer), _steps(truth)


def _frame(writer) -> pl.DataFrame:
    c = {name: np.concatenate(parts) for name, parts in writer.columns.items()}
    kinds = pl.Series(KINDS)
    data = pl.DataFrame(
        {
            "k": c["kind"],
            **{
                n: c[n]
                for n in ("rank", "step", "start", "duration", "id", "parent", "group", "sequence")
            },
        }
    )
    is_collective = pl.col("k") == 5
    frame = data.select(
        run=pl.lit("generated"),
        rank="rank",
        step="step",
        kind=pl.col("k").map_batches(
            lambda k: kinds.gather(k.cast(pl.UInt32)), return_dtype=pl.String
        ),
        name=pl.when(is_collective).then(pl.lit("all_reduce")).otherwise(pl.lit("")),
        start_ns="start",
        duration_ns="duration",
        id="id",
        parent=pl.when(pl.col("parent") >= 0).then("parent"),
        group=pl.when(pl.col("group") >= 1000)
        .then(pl.format("tp{}", pl.col("group") - 1000))
        .when(pl.col("group") >= 0)
        .then(pl.format("dp{}", "group")),
        sequence=pl.when(pl.col("sequence") >= 0).then("sequence"),
        bytes=pl.when(is_collective).then(pl.lit(4 << 20)),
        dtype=pl.when(is_collective).then(pl.lit("float32")),
        device=pl.lit("cpu"),
        thread=pl.lit(1),
        cpu_ns=pl.lit(None),
        attributes=pl.lit(None),
    )
    return frame.cast(dict(table_schema("spans")))


def _steps(truth) -> pl.DataFrame:
    frame = pl.concat(truth).with_columns(run=pl.lit("generated"), complete=pl.lit(value=True))
    missing = {n: t for n, t in table_schema("steps").items() if n not in frame.columns}
    return (
        frame.with_columns(pl.lit(None, dtype=t).alias(n) for n, t in missing.items())
        .select(list(table_schema("steps")))
        .cast(dict(table_schema("steps")))
        .sort("rank", "step")
    )


def _facts(s: Schedule, tp_group, dp_group, end_ns) -> RunFacts:
    def groups(rank):
        dp = tuple(int(r) for r in np.flatnonzero(dp_group == dp_group[rank]))
        found = [
            ProcessGroup(name=f"dp{dp_group[rank]}", description="dp", ranks=dp, backend="gloo")
        ]
        if s.tensor_parallel > 1:
            tp = tuple(int(r) for r in np.flatnonzero(tp_group == tp_group[rank]))
            found.append(
                ProcessGroup(name=f"tp{tp_group[rank]}", description="tp", ranks=tp, backend="gloo")
            )
        return tuple(found)

    return RunFacts(
        run="generated",
        command=("python", "train.py"),
        start_ns=START_NS,
        end_ns=end_ns,
        exit_code=0,
        slurm_job=None,
        nodes=tuple(f"node{n:04d}" for n in range(-(-s.ranks // 8))),
        ranks=tuple(
            RankFacts(
                rank=r,
                local_rank=r % 8,
                world_size=s.ranks,
                node=f"node{r // 8:04d}",
                pid=1000 + r,
                device="cpu",
                torch_version="2.13.0",
                python_version="3.11.2",
                parameters=1_000_000,
                layers=4,
                hidden=128,
                model_flops_per_step=6e9,
                tokens_per_step=1024.0,
                groups=groups(r),
            )
            for r in range(s.ranks)
        ),
    )


def with_clocks(
    spans: pl.DataFrame,
    offset_ns: dict[int, float],
    drift_ppm: dict[int, float],
    *,
    origin_ns: int = START_NS,
) -> pl.DataFrame:
    """Read every rank's spans on its own wrong clock: t' = t + offset + drift·(t − origin)."""
    ranks = sorted(spans["rank"].unique().to_list())
    table = pl.DataFrame(
        {
            "rank": ranks,
            "o": [float(offset_ns.get(r, 0.0)) for r in ranks],
            "d": [drift_ppm.get(r, 0.0) * 1e-6 for r in ranks],
        },
        schema_overrides={"rank": pl.Int32},
    )
    since = (pl.col("start_ns") - origin_ns).cast(pl.Float64)
    end_since = since + pl.col("duration_ns").cast(pl.Float64)
    moved = spans.join(table, on="rank", how="left", maintain_order="left").with_columns(
        start_ns=pl.col("start_ns") + (pl.col("o") + pl.col("d") * since).round().cast(pl.Int64),
        end=(pl.col("start_ns") + pl.col("duration_ns"))
        + (pl.col("o") + pl.col("d") * end_since).round().cast(pl.Int64),
    )
    return moved.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")).select(spans.columns)
