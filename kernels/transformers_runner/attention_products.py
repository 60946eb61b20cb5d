"""Attention of some rows' queries to the keys and values that they read, in plain torch.

`paged_attention.py` gathers what is read; here are the products. Where nothing but a mask is added to softmax(q.k) v,
torch's own attention computes them.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention


@attrs.frozen(eq=False)
class Scores:
    """How scores are made of products of queries and keys."""

    scale: float
    soft_cap: float | None = None
    """A cap c turns a score s into c * tanh(s / c)."""
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes part in the softmax and has no value."""


def attend(
    q_RHnE: torch.Tensor,
    k_RKCE: torch.Tensor,
    v_RKCF: torch.Tensor,
    hidden_RnC: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Compute o_RHnF. Consecutive groups of H/K query heads share a key/value head."""
    num_heads, num_queries, num_groups = q_RHnE.shape[1], q_RHnE.shape[2], k_RKCE.shape[1]
    seen_R1nC = None if hidden_RnC is None else ~hidden_RnC.unsqueeze(1)
    share = num_heads // num_groups
    if num_queries == 1:
        # the heads of a group are the rows of one product
        q_RHnE = q_RHnE.reshape(q_RHnE.shape[0], num_groups, share, -1)
    elif share > 1:
        k_RKCE, v_RKCF = k_RKCE.repeat_interleave(share, 1), v_RKCF.repeat_interleave(share, 1)
    if scores.soft_cap is None and scores.sinks_H is None:
        o_RHnF = scaled_dot_product_attention(q_RHnE, k_RKCE, v_RKCF, attn_mask=seen_R1nC, scale=scores.scale)
    else:
        s_RHnC = (q_RHnE @ k_RKCE.transpose(2, 3)).float() * scores.scale
        if scores.soft_cap is not None:
            s_RHnC = torch.tanh(s_RHnC / scores.soft_cap) * scores.soft_cap
        if seen_R1nC is not None:
            s_RHnC = s_RHnC.masked_fill(~seen_R1nC, -torch.inf)
        p_RHnC = _softmax(s_RHnC, scores.sinks_H, num_heads, num_queries)
        o_RHnF = p_RHnC.to(v_RKCF.dtype) @ v_RKCF
    return o_RHnF.reshape(o_RHnF.shape[0], num_heads, num_queries, -1)


def _softmax(s_RHnC: torch.Tensor, sinks_H: torch.Tensor | None, num_heads: int, num_queries: int) -> torch.Tensor:
    if sinks_H is None:
        return torch.softmax(s_RHnC, -1)
    sinks_1Hn1 = sinks_H.float().view(1, num_heads, 1, 1).expand(1, -1, num_queries, 1)
    sinks = sinks_1Hn1.reshape(1, s_RHnC.shape[1], s_RHnC.shape[2], 1).expand(len(s_RHnC), -1, -1, 1)
    return torch.softmax(torch.cat([s_RHnC, sinks], -1), -1)[..., :-1]
