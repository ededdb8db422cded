"""Parameter counts of every model family against transformers' own modules on the meta device."""

import pytest

from kansoku.catalog.models import shape_from_config
from kansoku.plan.parameters import count_parameters

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"head_dim": 32}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", MOE | {"head_dim": 32}),
    ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 80}),
    ("deepseek_v3", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("gemma", {"head_dim": 32}),
    ("phi3", {"pad_token_id": 0}),
    ("granite", {}),
    ("nemotron", {}),
]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_counts_equal_transformers(family, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gpt2":
        values = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    else:
        values = SMALL | changes
    config = AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters())
    shape = shape_from_config(config.to_dict())
    assert count_parameters(shape).total == expected
