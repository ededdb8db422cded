"""FLOPs and MFU against published tables and hand-derived numbers."""

import csv
from pathlib import Path

import pytest

from kansoku.catalog.accelerators import accelerator
from kansoku.catalog.models import ModelShape, model_shape
from kansoku.errors import InputError
from kansoku.plan.flops import step_flops, utilisation

DATA = Path(__file__).parents[2] / "data" / "plan"


def rows(name):
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mfu(flops, step_s, peak, convention="full_attention"):
    return utilisation(
        flops, step_s=step_s, peak_flops=peak, peak_source="published table", convention=convention
    )


def test_toy_by_hand():
    """One layer of width 2, one head, 3 tokens, 5 words: every product counted by hand.

    Weights 4 x 2 x 2 + 2 x 2 x 8 = 48; 6 x 48 x 3 = 864. Scores and values: 2 products of
    2 x 3 x 3 x 2 = 36, threefold: 216. Logits 6 x 2 x 5 x 3 = 180.
    """
    toy = ModelShape(
        name="toy", title="", layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, ffn=8, vocab=5,
        seq=3, gated=False, tied=True,
    )  # fmt: skip
    flops = step_flops(toy, global_batch=1)
    assert (flops.matrices, flops.attention, flops.logits) == (864, 216, 180)
    assert flops.conventions["full_attention"] == 1260
    assert flops.conventions["causal_attention"] == 1152
    assert step_flops(toy, global_batch=1, recompute="full").conventions["hardware"] == 1620
    assert step_flops(toy, global_batch=1, recompute="selective").conventions["hardware"] == 1332


def test_mixtral_active_products_by_hand():
    """Per token and layer: q, o 4096², k, v 4096 x 1024, router 4096 x 8, two experts of three."""
    per_layer = 2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 3 * 4096 * 14336
    flops = step_flops(model_shape("mixtral-8x7b"), global_batch=1, seq=128)
    assert flops.matrices == 6 * 128 * 32 * per_layer


def test_palm_convention():
    """PaLM 540B: 6N + 12LHQT with the paper's N = 540.35e9, L 118, H 48, Q 256, T 2048."""
    llama = step_flops(model_shape("llama2-7b"), global_batch=1)
    expected = 4096 * (6 * 6_738_415_616 + 12 * 32 * 32 * 128 * 4096)
    assert llama.conventions["palm"] == expected


@pytest.mark.parametrize(
    "row",
    rows("dgxc_pretrain_perf.csv"),
    ids=lambda r: f"{r['model']}-{r['precision']}-{r['gpus']}",
)
def test_dgx_cloud_mfu_within_half_a_point(row):
    name = {"Nemotron4-15B": "nemotron4-15b"}.get(row["model"], row["model"])
    device = accelerator({"H100": "h100-sxm", "GB200": "gb200"}[row["gpu"]])
    peak = device.peak_flops[row["precision"].lower()] * int(row["gpus"])
    flops = step_flops(model_shape(name), global_batch=int(row["gbs"]), seq=int(row["seq"]))
    got = mfu(flops, float(row["step_s"]), peak)
    assert abs(round(100 * got.value, 2) - float(row["published_mfu_pct"])) <= 0.5 + 1e-9


@pytest.mark.parametrize(
    "row", rows("korthikanti2022_table5.csv"), ids=lambda r: f"{r['model']}-{r['gpus']}"
)
def test_korthikanti_mfu_and_hfu_within_a_fifth(row):
    name = {"22B": "megatron-22b", "175B": "gpt3-175b", "530B": "turing-530b", "1T": "megatron-1t"}
    flops = step_flops(
        model_shape(name[row["model"]]), global_batch=int(row["gbs"]), recompute="selective"
    )
    peak, step_s = 312e12 * int(row["gpus"]), float(row["iter_seqpar_selective_s"])
    got = mfu(flops, step_s, peak)
    assert abs(100 * got.value - float(row["mfu_pct"])) <= 0.2
    if row["hfu_pct"]:
        hfu = mfu(flops, step_s, peak, "hardware_korthikanti")
        assert abs(100 * hfu.value - float(row["hfu_pct"])) <= 0.2


def test_sc21_counts_four_forwards():
    """arXiv 2104.04473 eq. 3 with 163 TFLOP/s a GPU at 3,072 GPUs gives the row's iteration."""
    flops = step_flops(model_shape("megatron-1t"), global_batch=3072, recompute="full")
    logits_again = flops.logits / 3  # that paper also repeats the logits' forward
    assert (flops.conventions["hardware"] + logits_again) / 3072 / 102.63 == pytest.approx(
        163e12, rel=0.005
    )


def test_above_one_hundred_percent_is_an_error():
    flops = step_flops(model_shape("gpt2"), global_batch=1)
    with pytest.raises(InputError, match="outside 0-1"):
        mfu(flops, 1e-6, 1e12)


def test_wrong_arguments_say_so():
    with pytest.raises(InputError, match="global batch"):
        step_flops(model_shape("gpt2"), global_batch=0)
    with pytest.raises(InputError, match="recomputation"):
        step_flops(model_shape("gpt2"), global_batch=1, recompute="some")
    with pytest.raises(InputError, match="convention"):
        mfu(step_flops(model_shape("gpt2"), global_batch=1), 1, 1e15, "ours")


@pytest.mark.parametrize(
    ("step_s", "peak"), [(float("nan"), 1e15), (float("inf"), 1e15), (0, 1e15)]
)
def test_a_step_takes_a_finite_time(step_s, peak):
    with pytest.raises(InputError, match="a step must take more than 0 s"):
        mfu(step_flops(model_shape("gpt2"), global_batch=1), step_s, peak)


@pytest.mark.parametrize("peak", [float("nan"), -1e15, 0])
def test_a_peak_is_above_zero(peak):
    with pytest.raises(InputError, match="a peak must be above 0"):
        mfu(step_flops(model_shape("gpt2"), global_batch=1), 1, peak)
