"""A mixture of experts in fixed tiles: each expert multiplies its tokens' rows in products of one shape.

What must always hold: a token's result is a function of its own row; it does not depend on the other tokens of the same
expert. So an expert's rows are padded to whole tiles, and a token's parts are summed in its own order.
"""

from __future__ import annotations

import torch

from ..ops import Experts
from .rows import ROWS, clamped_swiglu, multiply, round_up, row_by_row, silu_mul


def mix_experts(x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See `Ops.experts`."""
    weight_NT, chosen_NT = _choose(router_NX, experts)
    parts_NTD = x_ND.new_empty((*chosen_NT.shape, x_ND.shape[1]))
    for expert in sorted(set(chosen_NT.flatten().tolist())):
        token_n, place_n = torch.where(chosen_NT == expert)
        tile_MD = x_ND.new_zeros((round_up(len(token_n), ROWS), x_ND.shape[1]))
        tile_MD[: len(token_n)] = x_ND[token_n]
        parts_NTD[token_n, place_n] = _run(tile_MD, experts, expert)[: len(token_n)]
    y_ND = parts_NTD[:, 0] * weight_NT[:, :1]
    for place in range(1, experts.num_chosen):
        y_ND = y_ND + parts_NTD[:, place] * weight_NT[:, place : place + 1]
    return y_ND


def _run(x_MD: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
    biases, clamp = experts.biases, experts.clamp
    gate_up_M2F = multiply(x_MD, experts.gate_up_OD[expert])
    if biases is not None:
        gate_up_M2F = gate_up_M2F + biases.gate_up_XO[expert]
    hidden_MF = silu_mul(gate_up_M2F) if clamp is None else clamped_swiglu(gate_up_M2F, clamp)
    y_MD = multiply(hidden_MF, experts.down_DF[expert])
    return y_MD if biases is None else y_MD + biases.down_XD[expert]


def _choose(router_NX: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indexes of each token's experts, by descending weight."""
    power_NX = row_by_row(torch.exp, router_NX - router_NX.amax(-1, keepdim=True))
    # chosen by score, not by weight: different scores may have the same exponential
    order_NX = torch.sort(router_NX, dim=-1, descending=True, stable=True).indices
    chosen_NT = order_NX[:, : experts.num_chosen]
    power_NT = power_NX.gather(1, chosen_NT)
    total_N1 = (power_NT if experts.normalise else power_NX).sum(-1, keepdim=True)
    return power_NT / total_N1, chosen_NT
