"""Operation traces of a job whose step times follow from hand: one-forward-one-backward, no delay.

Compute takes ``forward_s`` and ``backward_s``, transfers take nothing, so with M micro-batches and
P equal stages the step is (M + P − 1) × (forward + backward).
"""

import polars as pl


def pipeline_rows(
    *,
    dp_size: int = 4,
    stages: int = 2,
    micro_batches: int = 4,
    steps: int = 3,
    forward=lambda _dp, _stage, _step, _mb: 1.0,
    backward=None,
    transfer=lambda _dp, _step: 0.0,
):
    """Return the rows. Times are given by functions of (dp, stage, step, micro-batch)."""
    if backward is None:

        def backward(dp, stage, step, mb):
            return 2 * forward(dp, stage, step, mb)

    rows = []
    for step in range(steps):
        cells = {
            dp: _pass(dp, step, stages, micro_batches, forward, backward) for dp in range(dp_size)
        }
        # Everybody reduces gradients once the slowest worker of the stage is done.
        for stage in range(stages):
            ends = [cells[dp][stage]["end"] for dp in range(dp_size)]
            for dp in range(dp_size):
                rank = dp * stages + stage
                own = cells[dp][stage]
                head = (dp, stage, rank, step)
                rows += [(*head, *row) for row in own["rows"]]
                reduced = max(ends) + transfer(dp, step)
                rows.append(
                    (*head, "grads-reduce-scatter", own["end"], reduced - own["end"], 0, 0, -1, -1)
                )
                cells[dp][stage]["reduced"] = reduced
        clip = max(cells[dp][stage]["reduced"] for dp in cells for stage in range(stages))
        for dp in range(dp_size):
            for stage in range(stages):
                head = (dp, stage, dp * stages + stage, step)
                start = cells[dp][stage]["reduced"]
                rows.append((*head, "optimizer-clip-main-grad", start, clip - start, 0, -1, -1, -1))
                rows.append((*head, "optimizer", clip, 0.5, 0, -1, -1, -1))
    return pl.DataFrame(
        rows,
        schema={
            "dp_rank": pl.Int8, "stage": pl.Int8, "rank": pl.Int16, "step": pl.Int64,
            "optype": pl.String, "start_ts": pl.Float64, "duration": pl.Float64,
            "seq_id": pl.Int32, "mc": pl.Int8, "mb_id": pl.Int8, "gmc": pl.Int16,
        },
        orient="row",
    ).with_columns(pl.col("optype").cast(pl.Categorical))  # fmt: skip


def _order(stage, stages, micro_batches):
    warm = min(stages - stage - 1, micro_batches)
    order = [("forward", mb) for mb in range(warm)]
    for mb in range(micro_batches - warm):
        order += [("forward", warm + mb), ("backward", mb)]
    return order + [("backward", mb) for mb in range(micro_batches - warm, micro_batches)]


def _pass(dp, step, stages, micro_batches, forward, backward):
    """Play the schedule until every stage is through; transfers take no time."""
    done = {}
    free = [0.0] * stages
    queues = [_order(stage, stages, micro_batches) for stage in range(stages)]
    cells = {stage: {"rows": [], "end": 0.0} for stage in range(stages)}
    while any(queues):
        for stage in range(stages):
            while queues[stage]:
                kind, mb = queues[stage][0]
                delta = -1 if kind == "forward" else 1
                peer = stage + delta
                needs = (kind, peer, mb)
                has_peer = 0 <= peer < stages
                if has_peer and needs not in done:
                    break
                queues[stage].pop(0)
                before = free[stage]
                start = max(before, done[needs]) if has_peer else before
                work = forward if kind == "forward" else backward
                took = work(dp, stage, step, mb)
                free[stage] = done[kind, stage, mb] = start + took
                gmc = stage
                rows = cells[stage]["rows"]
                rows.append((f"{kind}-compute", start, took, mb, 0, mb, gmc))
                if has_peer:
                    rows.append((f"{kind}-recv", before, start - before, mb, -1, -1, -1))
                cells[stage]["end"] = free[stage]
    for stage in range(stages):
        for kind, delta in (("forward", 1), ("backward", -1)):
            if 0 <= stage + delta < stages:
                for mb in range(micro_batches):
                    # A send ends when its receiver has it, which is when both are there.
                    end = done[kind, stage, mb]
                    took = next(
                        row[1] + row[2]
                        for row in cells[stage + delta]["rows"]
                        if row[0] == f"{kind}-recv" and row[3] == mb
                    )
                    cells[stage]["rows"].append(
                        (f"{kind}-send", end, max(took - end, 0.0), mb, -1, -1, -1)
                    )
    return cells
