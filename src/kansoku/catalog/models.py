"""Model shapes: layers, widths, heads, experts, vocabulary, each with its source.

A shape comes from the shipped table (``data/models.toml``), from a Hugging Face ``config.json``
(:func:`shape_from_config`), or is built field by field.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from kansoku.errors import InputError

__all__ = ["ModelShape", "model_shape", "model_shapes", "shape_from_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only transformer."""

    name: str
    title: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Key/value heads (groups) of grouped-query attention; ``heads`` without grouping."""
    head_dim: int
    ffn: int
    """Width of the dense feed-forward layer."""
    vocab: int
    """Rows of the embedding, padding included."""
    seq: int
    """Training sequence length, tokens."""
    gated: bool
    """SwiGLU and the like: two input projections instead of one."""
    tied: bool
    """Input and output embedding share their weights."""
    positions: int = 0
    """Rows of a learned position embedding; 0 for rotary or none."""
    bias: bool = False
    """Biases in every linear layer."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections alone."""
    norm_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    qk_norm: bool = False
    """RMSNorm over each head of query and key."""
    dropout: bool = False
    """Trained with dropout, whose masks are kept for the backward pass."""
    experts: int = 0
    """Routed experts a layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    """Width of all shared experts together."""
    shared_expert_gate: bool = False
    dense_layers: int = 0
    """Leading layers that stay dense in a mixture-of-experts model."""
    kv_lora_rank: int = 0
    """Latent width of multi-head latent attention; 0 for ordinary attention."""
    q_lora_rank: int = 0
    """Latent width of the queries; 0: queries are projected directly."""
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0
    """Width of a value head; equals ``head_dim`` in ordinary attention."""
    source: str = "given by flags"
    notes: tuple[str, ...] = ()
    """What was derived rather than given."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"model {self.name}: {name} must be a positive whole number")
        widths = ("hidden", "vocab", "seq", "ffn", "head_dim", "heads", "expert_ffn")
        for names, limit in ((("layers", "experts"), 10_000), (widths, 2**31)):
            for name in names:
                if getattr(self, name) > limit:
                    raise InputError(f"model {self.name}: {name} is above {limit:,}")
        if self.heads % self.kv_heads:
            raise InputError(
                f"model {self.name}: {self.kv_heads} key/value heads do not divide "
                f"{self.heads} heads"
            )
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn):
            raise InputError(
                f"model {self.name}: {self.experts} experts need experts per token (1 to "
                f"{self.experts}) and the width of an expert"
            )
        if not self.experts and self.ffn < 1:
            raise InputError(f"model {self.name}: ffn must be a positive whole number")
        if self.latent and (self.qk_dim < 1 or self.v_head_dim < 1):
            raise InputError(
                f"model {self.name}: latent attention needs the widths of a query and a value head"
            )
        if not 0 <= self.dense_layers <= self.layers:
            raise InputError(f"model {self.name}: dense_layers is outside 0-{self.layers}")

    @property
    def latent(self) -> bool:
        """Multi-head latent attention (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_dim + self.qk_rope_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.latent else self.head_dim

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def to_json(self) -> dict[str, object]:
        """Return the fields that matter for this kind of model."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in row.items() if v not in (0, False, ())} | {
            "gated": self.gated,
            "tied": self.tied,
        }


def _entry(name: str, row: Mapping[str, Any]) -> ModelShape:
    values = {k: v for k, v in row.items() if k != "aliases"}
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    values.setdefault("ffn", 4 * values["hidden"])
    return ModelShape(name=name, **values)


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("kansoku.catalog") / "data" / "models.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def model_shapes() -> dict[str, ModelShape]:
    """Return every model of the catalogue by name."""
    return {name: _entry(name, row) for name, row in _table().items()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])


def model_shape(name: str) -> ModelShape:
    """Find a model by name or alias; case and punctuation do not matter."""
    wanted = _plain(name)
    for entry, row in _table().items():
        if wanted in {_plain(entry), *(_plain(alias) for alias in row.get("aliases", ()))}:
            return model_shapes()[entry]
    raise InputError(
        f"unknown model {name!r}",
        remedy=f"give a config.json, the flags --layers --hidden --heads --seq --vocab, or one of "
        f"{', '.join(_table())}",
    )


# Only families whose counts equal those of transformers' own modules.
_GATED_FAMILIES = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2",
    "deepseek_v3", "gemma", "phi3", "granite",
}  # fmt: skip
_PLAIN_FAMILIES = {"gpt2", "gpt_neox", "nemotron"}
_QK_NORM_FAMILIES = {"qwen3", "qwen3_moe"}


class _Config:
    """Read keys of a Hugging Face config, naming file and key in every complaint."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data, self.where = data, where

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name} must be a whole number, not {value!r}", where=self.where)
            return value
        if default is None:
            raise InputError(
                f"missing key {' or '.join(names)}",
                where=self.where,
                remedy="is this the config.json of a decoder-only language model?",
            )
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._data.get(name, default))


def shape_from_config(
    data: Mapping[str, Any], *, where: str = "config.json", seq: int | None = None
) -> ModelShape:
    """Turn a parsed Hugging Face ``config.json`` into a shape.

    ``seq`` replaces the config's maximum length, which is rarely the training length. Raises
    InputError for families whose parameters cannot be told from the config.
    """
    family = str(data.get("model_type", ""))
    if family not in _GATED_FAMILIES | _PLAIN_FAMILIES:
        raise InputError(
            f"model_type {family!r} is not known: its parameters would be a guess",
            where=where,
            remedy=f"known: {', '.join(sorted(_GATED_FAMILIES | _PLAIN_FAMILIES))}; or give flags",
        )
    config = _Config(data, where)
    hidden = config.integer("hidden_size", "n_embd")
    heads = config.integer("num_attention_heads", "n_head")
    grouped = family not in {"gpt2", "gpt_neox"}
    kv_heads = config.integer("num_key_value_heads", default=heads) if grouped else heads
    longest = config.integer("max_position_embeddings", "n_positions")
    gpt2, neox = family == "gpt2", family == "gpt_neox"
    gated = family in _GATED_FAMILIES
    values: dict[str, Any] = {
        "name": str(data.get("_name_or_path") or family),
        "title": f"{family} ({where})",
        "layers": config.integer("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.integer("head_dim", default=0) or hidden // max(heads, 1),
        "ffn": config.integer("intermediate_size", "n_inner", default=4 * hidden),
        "vocab": config.integer("vocab_size"),
        "seq": seq or longest,
        "gated": gated,
        "tied": config.flag("tie_word_embeddings", default=gpt2 or family == "gemma"),
        "positions": longest if gpt2 else 0,
        "bias": gpt2 or neox or config.flag("attention_bias", default=False),
        "qkv_bias": family in {"qwen2", "qwen2_moe"},
        "norm_bias": family in _PLAIN_FAMILIES,
        "qk_norm": family in _QK_NORM_FAMILIES,
        "dropout": gpt2,
        "source": f"Hugging Face config {where}",
        "notes": () if seq else (f"sequence length {longest}: the config's maximum",),
    }
    if gated and values["bias"]:
        # attention_bias of the Llama family: biases in attention, none in the MLP.
        values |= {"bias": False, "qkv_bias": True}
        values["notes"] += ("attention_bias: the output projection's bias is not counted",)
    values |= _experts(config, family) | _latent(config, family)
    try:
        return ModelShape(**values)
    except InputError as error:
        raise InputError(
            error.message, where=where, remedy="is the config.json whole and unchanged?"
        ) from None


def _experts(config: _Config, family: str) -> dict[str, Any]:
    experts = config.integer("n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not experts:
        return {}
    width = config.integer("moe_intermediate_size", "intermediate_size")
    shared = config.integer("n_shared_experts", default=0) * width
    shared = config.integer("shared_expert_intermediate_size", default=shared)
    return {
        "experts": experts,
        "experts_per_token": config.integer("num_experts_per_tok", "num_experts_per_token"),
        "expert_ffn": width,
        "shared_expert_ffn": shared,
        "shared_expert_gate": family == "qwen2_moe",
        "dense_layers": config.integer("first_k_dense_replace", default=0),
    }


def _latent(config: _Config, family: str) -> dict[str, Any]:
    if family not in {"deepseek_v2", "deepseek_v3"}:
        return {}
    return {
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", default=0),
        "qk_nope_dim": config.integer("qk_nope_head_dim"),
        "qk_rope_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
    }
