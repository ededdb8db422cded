"""The search equals brute force, and says why layouts are out."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kansoku.catalog.models import model_shape
from kansoku.errors import ConfigurationError, InputError
from kansoku.plan.hardware import generic_hardware
from kansoku.plan.layout import Layout, LayoutColumns, Training
from kansoku.plan.memory import memory_columns
from kansoku.plan.search import Space, best_of, pareto_front, search
from kansoku.plan.timing import step_time

GPUS = 8


def brute_force(shape, training, hardware):
    """Walk every combination one by one, with the rules written out anew."""
    found, rejected = [], Counter()
    divisors = [n for n in range(1, GPUS + 1) if GPUS % n == 0]
    chunks = {n for n in range(1, 17) if shape.layers % n == 0 or (shape.layers + 2) % n == 0}
    experts = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0] or [1]
    micro = [n for n in (1, 2, 4, 8, 16) if n <= training.global_batch]
    for tp, pp, cp, dp in itertools.product(divisors, repeat=4):
        if tp * pp * cp * dp != GPUS:
            continue
        for ep, vp, mb, recompute, zero in itertools.product(
            experts, chunks, micro, ("none", "selective", "full"), range(4)
        ):
            layout = Layout(
                tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vp=vp, micro_batch=mb, recompute=recompute,
                zero=zero,
            )  # fmt: skip
            if not possible(shape, training, layout):
                rejected["rules"] += 1
                continue
            columns = LayoutColumns.of([layout])
            used = memory_columns(shape, training, columns).total[0]
            if used > hardware.memory_bytes:
                rejected["memory"] += 1
                continue
            seconds = step_time(shape, training, columns, hardware)[0].total[0]
            found.append((seconds, used, layout))
    return found, rejected


def possible(shape, training, x):
    widths = [shape.expert_ffn] if shape.experts else [shape.ffn]
    m, odd = divmod(training.global_batch, x.dp * x.micro_batch)
    chunks = x.pp * x.vp
    split = (
        shape.layers % chunks == 0
        or (1 < x.pp < shape.layers and (shape.layers + 2) % chunks == 0)
        or (x.vp == 1 and x.pp < shape.layers)
    )
    return (
        (8 % x.tp == 0 or x.tp % 8 == 0)
        and shape.heads % x.tp == 0
        and (shape.kv_heads % x.tp == 0 or x.tp % shape.kv_heads == 0)
        and all(width % x.tp == 0 for width in widths)
        and x.pp <= shape.layers
        and (x.cp == 1 or training.seq % (2 * x.cp) == 0)
        and (x.ep == 1 or shape.experts % x.ep == 0)
        and (x.dp * x.cp) % x.ep == 0
        and odd == 0
        and split
        and (x.vp == 1 or (x.pp > 1 and m % x.pp == 0))
        and (x.zero == 0 or x.dp * x.cp > 1)
        and x.recompute != "selective"
    )


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_search_equals_brute_force(name):
    shape = replace(model_shape(name), layers=4)
    training = Training(global_batch=4, seq=shape.seq, precision="bf16", grad_bytes=2)
    hardware = generic_hardware("h100", GPUS)
    expected, rejected = brute_force(shape, training, hardware)
    result = search(shape, training, hardware, top=10**6)
    got = {c.layout: (c.step_s, c.memory_bytes) for c in result.candidates}
    assert set(got) == {layout for _, _, layout in expected}
    for seconds, used, layout in expected:
        assert got[layout] == pytest.approx((seconds, used), rel=1e-12)
    times = [c.step_s for c in result.candidates]
    assert times == sorted(times)
    assert times[0] == pytest.approx(min(s for s, _, _ in expected))
    counted = dict(result.rejected)
    assert counted.pop("does not fit in GPU memory", 0) == rejected["memory"]
    assert sum(counted.values()) == rejected["rules"]
    assert result.tried == len(expected) + sum(rejected.values())


def test_pareto_front_by_definition():
    generator = np.random.default_rng(7)
    time, memory = generator.integers(0, 30, (2, 300)).astype(float)
    front = set(map(tuple, np.stack([time, memory], axis=1)[pareto_front(time, memory)]))
    for t, m in zip(time, memory, strict=True):
        beaten = ((time <= t) & (memory <= m) & ((time < t) | (memory < m))).any()
        assert ((t, m) in front) == (not beaten)


def test_nothing_fits_is_an_answer():
    shape = model_shape("gpt3-175b")
    training = Training(global_batch=8, seq=2048, precision="bf16")
    result = search(shape, training, generic_hardware("h100", 8))
    assert result.candidates == ()
    assert result.rejected["does not fit in GPU memory"] > 0
    assert sum(result.rejected.values()) == result.tried


def test_fixed_values_are_kept():
    shape = model_shape("llama3.1-8b")
    training = Training(global_batch=64, seq=8192, precision="bf16")
    space = Space(tp=[2], cp=[2], recompute=["full"])
    result = search(shape, training, generic_hardware("h100", 16), space=space)
    assert {(c.layout.tp, c.layout.cp, c.layout.recompute) for c in result.candidates} == {
        (2, 2, "full")
    }


def test_selective_recomputation_asked_for_by_name_is_tried():
    shape = model_shape("llama3.1-8b")
    training = Training(global_batch=64, seq=8192, precision="bf16")
    result = search(
        shape, training, generic_hardware("h100", 16), space=Space(recompute=["selective"])
    )
    assert result.candidates
    assert {c.layout.recompute for c in result.candidates} == {"selective"}


def test_search_and_explain_agree():
    shape = model_shape("llama3.1-8b")
    training = Training(global_batch=64, seq=8192, precision="bf16")
    hardware = generic_hardware("h100", 16)
    for found in search(shape, training, hardware, top=5).candidates:
        x = found.layout
        space = Space(
            tp=[x.tp], pp=[x.pp], dp=[x.dp], cp=[x.cp], ep=[x.ep], vp=[x.vp],
            micro_batch=[x.micro_batch], recompute=[x.recompute], zero=[x.zero],
        )  # fmt: skip
        assert best_of(shape, training, hardware, space).step_s == found.step_s


def test_impossible_layouts_say_why():
    shape = model_shape("gpt3-175b")
    training = Training(global_batch=64, seq=2048, precision="bf16")
    with pytest.raises(InputError, match="interleaving needs a pipeline"):
        best_of(shape, training, generic_hardware("h100", 8), Space(tp=[8], vp=[4]))
    with pytest.raises(InputError, match="must equal the number of GPUs"):
        best_of(shape, training, generic_hardware("h100", 8), Space(tp=[8], pp=[2]))


def test_unmeasured_gpu_is_refused():
    with pytest.raises(ConfigurationError, match="no measured point"):
        search(
            model_shape("gpt2"),
            Training(global_batch=8, seq=1024, precision="bf16"),
            generic_hardware("b300", 8),
        )


def test_every_fp8_peak_is_known_or_refused():
    with pytest.raises(InputError, match="no published dense fp8 peak"):
        search(
            model_shape("gpt2"),
            Training(global_batch=8, seq=1024, precision="fp8"),
            generic_hardware("a100", 8),
        )
