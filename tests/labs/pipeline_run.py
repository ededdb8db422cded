"""Pipeline-parallel runs as our recorder would have written them, from operations known by hand.

``operation_traces.pipeline_rows`` says what every worker did when; here each operation becomes the
spans that a rank leaves: sends and receives issued without blocking, with their peer's place in the
pipeline group, and collectives that block.
"""

from collections import Counter
from dataclasses import replace

import polars as pl
from tests.labs.generated_run import START_NS, Schedule, generate

from kansoku.model import ProcessGroup, table_schema

_SPANS = {
    "forward-compute": ("forward", "Stage"),
    "backward-compute": ("backward", "backward"),
    "optimizer": ("optimizer", "Adam"),
    "grads-reduce-scatter": ("collective", "reduce_scatter"),
    "optimizer-clip-main-grad": ("collective", "all_reduce"),
}


def pipeline_run(rows: pl.DataFrame):
    """Return facts and spans; rank = dp rank × stages + stage."""
    dp_size, stages = int(rows["dp_rank"].max()) + 1, int(rows["stage"].max()) + 1
    length = int((rows["start_ts"] + rows["duration"]).max() * 1e9) + 1_000_000
    spans = []
    counts = Counter()
    ids = Counter()

    def add(rank, step, kind, name, start, duration, group=None, attributes=None):
        ids[rank] += 1
        sequence = None
        if group is not None:
            sequence = counts[rank, group, name]
            counts[rank, group, name] += 1
        spans.append(
            {
                "run": "pipeline", "rank": rank, "step": step, "kind": kind, "name": name,
                "start_ns": start, "duration_ns": duration, "id": ids[rank], "group": group,
                "sequence": sequence, "device": "cpu", "thread": 1, "attributes": attributes,
            }
        )  # fmt: skip

    for rank in range(dp_size * stages):
        for step in rows["step"].unique().sort().to_list():
            add(rank, step, "step", "step", START_NS + step * length, length)
    for row in rows.sort("step", "start_ts", "seq_id", "optype").iter_rows(named=True):
        dp, stage, step, kind = row["dp_rank"], row["stage"], row["step"], str(row["optype"])
        start = START_NS + step * length + round(row["start_ts"] * 1e9)
        duration = round(row["duration"] * 1e9)
        rank = dp * stages + stage
        if kind in _SPANS:
            name, word = _SPANS[kind]
            group = {"reduce_scatter": f"dp{stage}", "all_reduce": "world"}.get(word)
            add(rank, step, name, word, start, duration, group)
        else:
            direction, word = kind.split("-")
            ahead = (word == "send") == (direction == "forward")
            peer = stage + 1 if ahead else stage - 1
            text = f'{{"async":true,"peer":{peer}}}'
            add(rank, step, "collective", word, start, duration, f"pp{dp}", text)
    facts, _, _ = generate(Schedule(ranks=dp_size * stages, steps=1))
    ranks = tuple(
        replace(
            one,
            groups=(
                _group(f"pp{one.rank // stages}", "pp", [one.rank // stages * stages + s
                                                         for s in range(stages)]),
                _group(f"dp{one.rank % stages}", "dp", [dp * stages + one.rank % stages
                                                        for dp in range(dp_size)]),
                _group("world", None, range(dp_size * stages)),
            ),
        )
        for one in facts.ranks
    )  # fmt: skip
    return replace(facts, run="pipeline", ranks=ranks), pl.DataFrame(
        spans, schema=dict(table_schema("spans")), orient="row"
    )


def _group(name, description, ranks):
    return ProcessGroup(name=name, description=description, ranks=tuple(ranks), backend="gloo")
