"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): its weights, and queries and keys in terms of latents.

A head's key is a matrix K times the token's latent c, and elements that are rotated; its value is a matrix V times c.
Instead of K c, a query is multiplied with K transposed, and instead of V c, c is summed and then multiplied with V. So
all heads have the same key and value, and the cache holds one vector per token and layer: what is rotated, and c. Heads
return sums of whole vectors, of which the part that is rotated is not used.

What must always hold: the matrices K and V are read from one tensor of the checkpoint, each part once.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.row_slices import rows_of
from ..checkpoints.weights import Weights
from ..ops import Ops, RopeTable
from .config import DecoderConfig
from .config_parts import LatentConfig
from .parts import read_norm


@attrs.frozen
class LatentAttention:
    """Projections of an attention layer."""

    down_OD: torch.Tensor
    """Makes queries, or their latent, and after them the keys' latent and what of keys is rotated."""
    query_norm: torch.Tensor | None
    query_OI: torch.Tensor | None
    """Makes queries of their latent; None: they have none."""
    norm: torch.Tensor
    """Of the keys' latent."""
    keys_OI: list[torch.Tensor]
    """K transposed, of each head."""
    values_OI: list[torch.Tensor]
    """V of each head."""
    o_DI: torch.Tensor


def read_latent_attention(weights: Weights, prefix: str, c: DecoderConfig, latent: LatentConfig) -> LatentAttention:
    D, H, L, K = c.hidden_size, c.num_heads, latent.width, latent.unrotated
    query, each = latent.unrotated + latent.rotated, latent.unrotated + latent.value
    kv = ("kv_a_proj_with_mqa", L + latent.rotated)
    Q = latent.query_width
    down = [("q_proj", H * query) if Q is None else ("q_a_proj", Q), kv]
    up = f"{prefix}kv_b_proj.weight"

    def of_head(head: int, first: int, count: int, *, transposed: bool) -> torch.Tensor:
        name = rows_of(up, head * each + first, count, total=H * each, transposed=transposed)
        return weights.tensor(name, (L, count) if transposed else (count, L))

    return LatentAttention(
        down_OD=weights.fused([(f"{prefix}{name}.weight", (rows, D)) for name, rows in down]),
        query_norm=None if Q is None else read_norm(weights, f"{prefix}q_a_layernorm.weight", Q, c),
        query_OI=None if Q is None else weights.tensor(f"{prefix}q_b_proj.weight", (H * query, Q)),
        norm=read_norm(weights, f"{prefix}kv_a_layernorm.weight", L, c),
        keys_OI=[of_head(head, 0, K, transposed=True) for head in range(H)],
        values_OI=[of_head(head, K, latent.value, transposed=False) for head in range(H)],
        o_DI=weights.tensor(f"{prefix}o_proj.weight", (D, H * latent.value)),
    )


def attend_latent(
    h_ND: torch.Tensor, attention: LatentAttention, index: int, rope: RopeTable, c: DecoderConfig, ops: Ops
) -> torch.Tensor:
    """Return what attention of layer `index` adds to normed activations: y_ND."""
    latent = c.latent
    assert latent is not None, "a model without latents has no such attention"
    down_NO = ops.linear(h_ND, attention.down_OD)
    kv_NI = down_NO[:, -latent.key :]
    q_NI = down_NO[:, : -latent.key]
    if attention.query_OI is not None and attention.query_norm is not None:
        q_NI = ops.linear(ops.rms_norm(q_NI, attention.query_norm, latent.eps), attention.query_OI)
    k_N1E = ops.norm_latent(kv_NI, attention.norm, latent.eps).unsqueeze(1)
    q_NHE = ops.linear_heads(q_NI.view(q_NI.shape[0], c.num_heads, -1), attention.keys_OI)
    q_NHE, k_N1E = ops.rope(q_NHE, rope), ops.rope(k_N1E, rope)
    ops.write_kv(index, k_N1E, k_N1E)
    o_NHE = ops.attend(index, q_NHE, scale=c.attention_scale)
    v_NHE = ops.linear_heads(o_NHE, attention.values_OI, first=latent.rotated)
    return ops.linear(v_NHE.flatten(1), attention.o_DI)
