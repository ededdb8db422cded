"""Memory against published figures, and properties."""

import csv
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.catalog.models import model_shape
from kansoku.plan.layout import Layout, LayoutColumns, Training
from kansoku.plan.memory import activation_bytes_per_layer, memory_columns

DATA = Path(__file__).parents[2] / "data" / "plan"
GIB = 2**30


def rows(name):
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def a100(**changes):
    values = {"global_batch": 4096, "seq": 2048, "precision": "fp16", "attention": "unfused"}
    return Training(**values | changes)


@pytest.mark.parametrize("row", rows("korthikanti2022_fig1_memory.csv"), ids=lambda r: r["model"])
def test_figure_1_to_every_digit(row):
    shape = model_shape(row["model"])
    layout = {
        "tp": int(row["tp"]), "pp": int(row["pp"]), "vp": int(row["interleave_m"]),
        "micro_batch": int(row["mbs"]),
    }  # fmt: skip
    only_tp = memory_columns(
        shape, a100(sequence_parallel=False), LayoutColumns.of([Layout(**layout)])
    )
    both = memory_columns(
        shape, a100(), LayoutColumns.of([Layout(**layout, recompute="selective")])
    )
    assert only_tp.layer_matrix_parameters[0] * 18 / GIB == float(row["params_opt_gib"])
    assert only_tp.activations[0] / GIB == float(row["act_tp_only_gib"])
    assert both.activations[0] / GIB == float(row["act_seqpar_selective_gib"])


@pytest.mark.parametrize(
    "row", rows("korthikanti2022_fig7_activation_pct.csv"), ids=lambda r: r["model"]
)
def test_figure_7_within_a_point(row):
    shape = model_shape(row["model"])
    columns = LayoutColumns.of([Layout(tp=8)])
    plain = activation_bytes_per_layer(shape, a100(sequence_parallel=False), columns)
    split = activation_bytes_per_layer(shape, a100(), columns)
    whole = plain["none"][0]
    got = {
        "seq_parallel": split["none"], "selective": plain["selective"],
        "seqpar_selective": split["selective"], "full_recompute": plain["full"],
    }  # fmt: skip
    for name, value in got.items():
        assert abs(100 * value[0] / whole - float(row[name])) <= 1, name


@pytest.mark.parametrize("row", rows("memory_logs.csv"), ids=lambda r: r["model"])
def test_allocated_after_set_up_within_one_percent(row):
    layout = Layout(tp=int(row["tp"]), cp=int(row["cp"]), dp=int(row["dp"]), zero=1)
    shape = model_shape(row["model"])
    training = Training(
        global_batch=layout.dp, seq=shape.seq, precision="bf16", grad_bytes=int(row["grad_bytes"])
    )
    memory = memory_columns(shape, training, LayoutColumns.of([layout]))
    states = (memory.weights + memory.gradients + memory.optimizer)[0] / 1e9
    assert states == pytest.approx(float(row["allocated_gb"]), rel=0.01)


# Peaks printed beside those logs, GB.
@pytest.mark.parametrize(
    ("name", "layout", "peak"),
    [
        ("llama3.1-8b", Layout(cp=2, dp=4, zero=1), 70.8),
        ("nemotron4-15b", Layout(tp=2, dp=32, zero=1, micro_batch=2), 73.0),
    ],
)
def test_peak_within_five_percent(name, layout, peak):
    shape = model_shape(name)
    training = Training(
        global_batch=layout.dp * layout.micro_batch, seq=shape.seq, precision="bf16", grad_bytes=2
    )
    total = memory_columns(shape, training, LayoutColumns.of([layout])).total[0] / 1e9
    assert total == pytest.approx(peak, rel=0.05)


def test_zero_stages_by_hand():
    """7.5 B parameters, 64 ranks: 120, 31.4, 16.6, 1.9 GB (arXiv 1910.02054, Figure 1).

    The paper rounds the parameters and shards 2-byte gradients.
    """
    shape = model_shape("llama2-7b")
    training = Training(global_batch=64, seq=4096, precision="bf16", grad_bytes=2)
    columns = LayoutColumns.of([Layout(dp=64, zero=z) for z in range(4)])
    memory = memory_columns(shape, training, columns)
    states = (memory.weights + memory.gradients + memory.optimizer) / 1e9 * 7.5 / 6.738415616
    assert states == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.01)


def test_experts_are_split_over_expert_ranks():
    """Mixtral: 32 layers x 8 experts x 3 x 4096 x 14336 = 45.1 B of the 46.7 B are routed."""
    shape = model_shape("mixtral-8x7b")
    training = Training(global_batch=8, seq=4096, precision="bf16", grad_bytes=2)
    columns = LayoutColumns.of([Layout(dp=8), Layout(dp=8, ep=8)])
    one, eight = memory_columns(shape, training, columns).parameters
    routed = 32 * 8 * 3 * 4096 * 14336
    assert one == 46_702_792_704
    assert one - eight == pytest.approx(routed * 7 / 8)


def test_fewer_micro_batches_than_stages_hold_less():
    shape = model_shape("gpt3-175b")
    columns = LayoutColumns.of([Layout(tp=8, pp=8)])
    few = memory_columns(shape, a100(global_batch=2), columns).activations
    many = memory_columns(shape, a100(global_batch=64), columns).activations
    assert many[0] == 4 * few[0]


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    micro=st.integers(1, 4),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.integers(0, 3),
)
def test_parts_sum_and_more_sharding_never_costs_states(tp, pp, cp, micro, recompute, zero):
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=4, micro_batch=micro, recompute=recompute, zero=zero)
    columns = LayoutColumns.of([layout, Layout(**{**_values(layout), "zero": 0})])
    memory = memory_columns(model_shape("gpt3-175b"), a100(), columns)
    counts = {"parameters", "layer_matrix_parameters"}
    parts = [getattr(memory, f.name) for f in fields(memory) if f.name not in counts]
    assert np.sum(parts, axis=0) == pytest.approx(memory.total)
    assert all((part >= 0).all() for part in parts)
    states = memory.weights + memory.gradients + memory.optimizer
    assert states[0] <= states[1]


def _values(layout):
    return {f.name: getattr(layout, f.name) for f in fields(layout)}
