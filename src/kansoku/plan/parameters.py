"""Parameter counts of a shape, by where they live."""

from dataclasses import dataclass

from kansoku.catalog.models import ModelShape

__all__ = ["ParameterCounts", "count_parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of one model; layer figures are per layer."""

    attention: int
    """Matrices of the attention block."""
    dense_ffn: int
    """Matrices of a dense feed-forward block."""
    expert: int
    """Matrices of one routed expert."""
    shared_expert: int
    """Matrices of all shared experts of a layer, and their gate."""
    router: int
    vectors: int
    """Norms and biases of a layer."""
    embedding: int
    """Token embedding."""
    positions: int
    output: int
    """Output projection; 0 where it is the embedding."""
    final_norm: int
    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int

    @property
    def dense_layer(self) -> int:
        """All of one dense layer."""
        return self.attention + self.dense_ffn + self.vectors

    @property
    def moe_layer(self) -> int:
        """All of one mixture-of-experts layer."""
        routed = self.experts * self.expert
        return self.attention + routed + self.shared_expert + self.router + self.vectors

    @property
    def total(self) -> int:
        """Every parameter, tied weights once."""
        ends = self.embedding + self.positions + self.output + self.final_norm
        dense = self.layers - self.moe_layers
        return dense * self.dense_layer + self.moe_layers * self.moe_layer + ends

    @property
    def active(self) -> int:
        """Parameters that one token passes."""
        idle = (self.experts - self.experts_per_token) * self.expert
        return self.total - self.moe_layers * idle


def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Count the parameters of a shape."""
    hidden, heads, kv = shape.hidden, shape.heads, shape.kv_heads
    norm = hidden * (2 if shape.norm_bias else 1)
    vectors = 2 * norm
    if shape.latent:
        queries = heads * shape.qk_dim
        if shape.q_lora_rank:
            attention = hidden * shape.q_lora_rank + shape.q_lora_rank * queries
            vectors += shape.q_lora_rank
        else:
            attention = hidden * queries
        attention += hidden * (shape.kv_lora_rank + shape.qk_rope_dim)
        attention += shape.kv_lora_rank * heads * (shape.qk_nope_dim + shape.v_dim)
        attention += heads * shape.v_dim * hidden
        vectors += shape.kv_lora_rank
    else:
        qkv = (heads + 2 * kv) * shape.head_dim
        attention = hidden * qkv + heads * shape.head_dim * hidden
        if shape.bias or shape.qkv_bias:
            vectors += qkv
    projections = 3 if shape.gated else 2
    if shape.bias:
        vectors += hidden + (projections - 1) * shape.ffn + hidden
    if shape.qk_norm:
        vectors += 2 * shape.head_dim
    table = shape.vocab * hidden
    return ParameterCounts(
        attention=attention,
        dense_ffn=projections * hidden * shape.ffn,
        expert=projections * hidden * shape.expert_ffn,
        shared_expert=projections * hidden * shape.shared_expert_ffn
        + (hidden if shape.shared_expert_gate else 0),
        router=hidden * shape.experts,
        vectors=vectors,
        embedding=table,
        positions=shape.positions * hidden,
        output=0 if shape.tied else table,
        final_norm=norm,
        layers=shape.layers,
        moe_layers=shape.moe_layers,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
    )
