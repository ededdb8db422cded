"""Parameter counts against the published ones."""

import pytest

from kansoku.catalog.models import model_shape
from kansoku.plan.parameters import count_parameters

# Exact counts of the published checkpoints (Hugging Face safetensors metadata and model cards).
EXACT = {
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
}


@pytest.mark.parametrize(("name", "published"), EXACT.items())
def test_total(name, published):
    assert count_parameters(model_shape(name)).total == published


# Papers: billions, rounded as printed.
ACTIVE = {"mixtral-8x7b": 12.9, "deepseek-v3": 37, "deepseek-v2": 21, "qwen3-235b-a22b": 22}


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active(name, billions):
    assert count_parameters(model_shape(name)).active / 1e9 == pytest.approx(billions, rel=0.02)


PAPERS = {
    "gpt3-175b": 174.6, "turing-530b": 529.6, "megatron-1t": 1008.0, "deepseek-v3": 671,
    "nemotron4-340b": 341,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PAPERS.items())
def test_paper_totals(name, billions):
    assert count_parameters(model_shape(name)).total / 1e9 == pytest.approx(billions, rel=0.001)
