"""Attention of Gemma 3n and 4: heads that may differ among layers, normed values, and layers that attend to earlier
ones' keys.

What must always hold: a layer attends to keys that it has written itself, or that an earlier layer with the same heads
has written in the same pass.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops, RopeTable
from .config import DecoderConfig
from .config_parts import HeadShape
from .parts import read_norm


@attrs.frozen
class GemmaAttention:
    """Projections of an attention layer; q, k and v are fused, or q alone where keys are another layer's."""

    projection_OD: torch.Tensor
    bias_O: torch.Tensor | None
    out_DI: torch.Tensor
    out_bias_D: torch.Tensor | None
    query_norm: torch.Tensor
    key_norm: torch.Tensor | None
    """None: keys are another layer's."""
    value_norm: torch.Tensor | None
    """Of ones."""
    heads: HeadShape
    cached: int
    """Which of the layers in the cache has the keys."""


def read_heads(
    weights: Weights, prefix: str, c: DecoderConfig, index: int, heads: HeadShape, *, values_are_keys: bool = False
) -> GemmaAttention:
    D, cached = c.hidden_size, c.cached[index]
    Q, KV = c.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    parts = [("q_proj", Q)]
    if cached == index:
        parts += [("k_proj", KV)] if values_are_keys else [("k_proj", KV), ("v_proj", KV)]
    norms = [
        read_norm(weights, f"{prefix}{name}_norm.weight", heads.head_dim, c) if len(parts) > 1 or name == "q" else None
        for name in "qk"
    ]
    assert norms[0] is not None
    biased = c.qkv_bias
    return GemmaAttention(
        projection_OD=weights.fused([(f"{prefix}{name}.weight", (rows, D)) for name, rows in parts]),
        bias_O=weights.fused([(f"{prefix}{name}.bias", (rows,)) for name, rows in parts]) if biased else None,
        out_DI=weights.tensor(f"{prefix}o_proj.weight", (D, Q)),
        out_bias_D=weights.tensor(f"{prefix}o_proj.bias", (D,)) if c.o_bias else None,
        query_norm=norms[0],
        key_norm=norms[1],
        value_norm=None if norms[1] is None else torch.ones_like(norms[1]),
        heads=heads,
        cached=cached,
    )


def attend_heads(
    h_ND: torch.Tensor,
    attention: GemmaAttention,
    rope: RopeTable,
    window: int | None,
    c: DecoderConfig,
    ops: Ops,
) -> torch.Tensor:
    """Return what attention adds to normed activations: y_ND."""
    heads, eps = attention.heads, c.rms_norm_eps
    projected_NO = ops.linear(h_ND, attention.projection_OD, attention.bias_O)
    all_NHE = projected_NO.view(projected_NO.shape[0], -1, heads.head_dim)
    q_NHE = ops.rms_norm(all_NHE[:, : c.num_heads], attention.query_norm, eps)
    if attention.key_norm is not None and attention.value_norm is not None:
        # the last heads are values, which may be the keys
        k_NKE, v_NKE = all_NHE[:, c.num_heads :][:, : heads.num_kv_heads], all_NHE[:, -heads.num_kv_heads :]
        v_NKE = ops.rms_norm(v_NKE, attention.value_norm, eps)
        k_NKE = ops.rms_norm(k_NKE, attention.key_norm, eps)
        q_NHE, k_NKE = ops.rope(q_NHE, rope), ops.rope(k_NKE, rope)
        ops.write_kv(attention.cached, k_NKE, v_NKE)
    else:
        q_NHE = ops.rope(q_NHE, rope)
    o_NHE = ops.attend(attention.cached, q_NHE, scale=c.attention_scale, window=window)
    return ops.linear(o_NHE.flatten(1), attention.out_DI, attention.out_bias_D)
