"""The model catalogue and Hugging Face configs."""

import pytest

from kansoku.catalog.models import model_shape, model_shapes, shape_from_config
from kansoku.errors import InputError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def test_every_model_names_its_source():
    assert all(shape.source and shape.title for shape in model_shapes().values())


@pytest.mark.parametrize(
    "name", ["GPT3-175B", "gpt3-175b (mlperf)", "gpt-3-175b", "openai/GPT3_175B"]
)
def test_names_ignore_case_and_punctuation(name):
    assert model_shape(name).name == "gpt3-175b"


def test_unknown_model_lists_the_known():
    with pytest.raises(InputError, match=r"llama3\.1-8b"):
        model_shape("gpt-9")


def test_config_equals_the_catalogue():
    shape, known = shape_from_config(LLAMA, seq=8192), model_shape("llama3.1-8b")
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "gated")
    assert [getattr(shape, n) for n in names] == [getattr(known, n) for n in names]


def test_config_says_where_it_is_wrong():
    with pytest.raises(InputError, match=r"x\.json.*num_hidden_layers"):
        shape_from_config(
            {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, where="x.json"
        )
    with pytest.raises(InputError, match="hidden_size must be a whole number"):
        shape_from_config(LLAMA | {"hidden_size": "many"})
    with pytest.raises(InputError, match="model_type 'mamba' is not known"):
        shape_from_config({"model_type": "mamba"})


def test_impossible_shapes_are_refused():
    with pytest.raises(InputError, match="do not divide"):
        shape_from_config(LLAMA | {"num_key_value_heads": 7})
    with pytest.raises(InputError, match="positive"):
        shape_from_config(LLAMA | {"num_hidden_layers": 0})


def test_impossible_configs_name_their_file():
    """Heads of no width, and what only the whole shape shows."""
    latent = LLAMA | {
        "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0, "v_head_dim": 0,
    }  # fmt: skip
    for config, words in (
        (latent, "latent attention needs"),
        ({**LLAMA, "num_attention_heads": 0}, "heads"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            shape_from_config(config, where="dir/config.json")
        assert str(caught.value).startswith("dir/config.json: ")
