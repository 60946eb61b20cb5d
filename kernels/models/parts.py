"""Reading the weights that models have in common. Matrices with the same input are fused along their rows.

A model's constructor calls these; what is computed with the weights is in its own file.

What must always hold: every tensor that the config implies is requested, in the shape that the config implies.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Shape, Weights
from ..ops import ExpertBiases, Ops
from .config import DecoderConfig
from .config_parts import MlpNames

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@attrs.frozen
class QueryKeyNorms:
    """Weights of the norms of queries and keys: of each head, or of all heads of a token together."""

    q: torch.Tensor
    k: torch.Tensor


@attrs.frozen
class Attention:
    """Projections of an attention layer; q, k and v are fused."""

    qkv_OD: torch.Tensor
    qkv_bias_O: torch.Tensor | None
    o_DI: torch.Tensor
    o_bias_D: torch.Tensor | None
    norms: QueryKeyNorms | None
    sinks_H: torch.Tensor | None


@attrs.frozen
class Mlp:
    """A gated MLP; gate and up are fused."""

    gate_up_OD: torch.Tensor
    down_DF: torch.Tensor


@attrs.frozen
class PlainMlp:
    """An MLP without a gate."""

    up_FD: torch.Tensor
    up_bias_F: torch.Tensor | None
    down_DF: torch.Tensor
    down_bias_D: torch.Tensor | None


@attrs.frozen
class Norm:
    """A norm of whole rows."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor | None

    def divided_by(self, divisor: float) -> Norm:
        """Return a norm whose results are divided."""
        bias_D = None if self.bias_D is None else self.bias_D.float() / divisor
        return Norm(self.weight_D.float() / divisor, bias_D)


@attrs.frozen
class Embeddings:
    """The token embedding and the output head."""

    embed_VD: torch.Tensor
    head_VD: torch.Tensor
    """The embedding itself if the two are tied."""
    head_bias_V: torch.Tensor | None


def read_norm(weights: Weights, name: str, width: int, c: DecoderConfig) -> torch.Tensor:
    weight = weights.tensor(name, (width,))
    return weight.float() + 1.0 if c.adds_one_to_norms else weight


def read_layer_norm(weights: Weights, name: str, c: DecoderConfig) -> Norm:
    bias = name.removesuffix("weight") + "bias"
    bias_D = weights.tensor(bias, (c.hidden_size,)) if c.norms_have_biases else None
    return Norm(read_norm(weights, name, c.hidden_size, c), bias_D)


def read_attention(weights: Weights, prefix: str, c: DecoderConfig) -> Attention:
    D, Q, KV = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [(prefix + "q_proj", Q), (prefix + "k_proj", KV), (prefix + "v_proj", KV)]
    if c.qkv_is_stored_fused:
        qkv = [(prefix + "qkv_proj", Q + 2 * KV)]
    return Attention(
        qkv_OD=weights.fused([(name + ".weight", (rows, D)) for name, rows in qkv]),
        qkv_bias_O=weights.fused([(name + ".bias", (rows,)) for name, rows in qkv]) if c.qkv_bias else None,
        o_DI=weights.tensor(prefix + "o_proj.weight", (D, Q)),
        o_bias_D=weights.tensor(prefix + "o_proj.bias", (D,)) if c.o_bias else None,
        norms=_read_norms(weights, prefix, c, Q, KV),
        sinks_H=weights.tensor(prefix + "sinks", (c.num_heads,)) if c.has_sinks else None,
    )


def _read_norms(weights: Weights, prefix: str, c: DecoderConfig, Q: int, KV: int) -> QueryKeyNorms | None:
    if not (c.norms_heads or c.norms_projections):
        return None
    widths = (c.head_dim, c.head_dim) if c.norms_heads else (Q, KV)
    q, k = (
        read_norm(weights, f"{prefix}{name}_norm.weight", width, c) for name, width in zip("qk", widths, strict=True)
    )
    return QueryKeyNorms(q, k)


def read_mlp(weights: Weights, prefix: str, D: int, F: int, names: MlpNames) -> Mlp:
    gate_up = [(names.gate, F), (names.up, F)] if names.gate_up is None else [(names.gate_up, 2 * F)]
    return Mlp(
        gate_up_OD=weights.fused([(f"{prefix}{name}.weight", (rows, D)) for name, rows in gate_up]),
        down_DF=weights.tensor(f"{prefix}{names.down}.weight", (D, F)),
    )


def read_expert_biases(weights: Weights, prefix: str, D: int, F: int, num_experts: int) -> ExpertBiases:
    each = range(num_experts)
    gate_up: list[tuple[str, Shape]] = [
        (f"{prefix}{x}.{name}_proj.bias", (F,)) for x in each for name in ("gate", "up")
    ]
    down: list[tuple[str, Shape]] = [(f"{prefix}{x}.down_proj.bias", (D,)) for x in each]
    return ExpertBiases(
        gate_up_XO=weights.fused(gate_up).view(num_experts, 2 * F), down_XD=weights.fused(down).view(num_experts, D)
    )


def read_plain_mlp(weights: Weights, prefix: str, c: DecoderConfig) -> PlainMlp:
    D, F = c.hidden_size, c.intermediate_size
    return PlainMlp(
        up_FD=weights.tensor(f"{prefix}c_fc.weight", (F, D)),
        up_bias_F=weights.tensor(f"{prefix}c_fc.bias", (F,)) if c.mlp_bias else None,
        down_DF=weights.tensor(f"{prefix}c_proj.weight", (D, F)),
        down_bias_D=weights.tensor(f"{prefix}c_proj.bias", (D,)) if c.mlp_bias else None,
    )


def read_embeddings(weights: Weights, c: DecoderConfig) -> Embeddings:
    embed_VD = weights.tensor(EMBEDDING, (c.vocab_size, c.hidden_size))
    bias_V = weights.tensor("lm_head.bias", (c.vocab_size,)) if c.head_bias else None
    if c.tie_word_embeddings:
        return Embeddings(embed_VD, embed_VD, bias_V)
    return Embeddings(embed_VD, weights.tensor(HEAD, (c.vocab_size, c.hidden_size)), bias_V)


def make_logits(h_ND: torch.Tensor, head: Embeddings, c: DecoderConfig, ops: Ops) -> torch.Tensor:
    """Apply the output head and the soft cap to final hidden states; return logits_NV."""
    logits_NV = ops.linear(h_ND, head.head_VD, head.head_bias_V)
    return logits_NV if c.logits_soft_cap is None else ops.soft_cap(logits_NV, c.logits_soft_cap)


def project_heads(
    h_ND: torch.Tensor, attention: Attention, c: DecoderConfig, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `(q_NHE, k_NKE, v_NKE)` of normed activations, before their rotation."""
    qkv_NO = ops.linear(h_ND, attention.qkv_OD, attention.qkv_bias_O)
    heads = qkv_NO.view(qkv_NO.shape[0], -1, c.head_dim)
    q_NHE, k_NKE, v_NKE = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
    if (norms := attention.norms) is None:
        return q_NHE, k_NKE, v_NKE
    return _norm(q_NHE, norms.q, c, ops), _norm(k_NKE, norms.k, c, ops), v_NKE


def _norm(x_NHE: torch.Tensor, weight: torch.Tensor, c: DecoderConfig, ops: Ops) -> torch.Tensor:
    """Norm each head, or all heads of a token together."""
    if c.norms_projections:
        return ops.rms_norm(x_NHE.flatten(1), weight, c.rms_norm_eps).view(x_NHE.shape)
    return ops.rms_norm(x_NHE, weight, c.rms_norm_eps)
