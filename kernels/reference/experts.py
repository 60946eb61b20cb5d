"""A mixture of experts in fixed tiles: each expert multiplies its tokens' rows in products of one shape.

What must always hold: a token's result is a function of its own row; it does not depend on the other tokens of the same
expert. So an expert's rows are padded to whole tiles, and a token's parts are summed in its own order.
"""

from __future__ import annotations

import torch

from ..ops import Choice, Experts
from .rows import ROWS, clamped_swiglu, gelu_mul, multiply, round_up, row_by_row, silu_mul


def mix_experts(x_ND: torch.Tensor, router_NX: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See `Ops.experts`."""
    weight_NT, chosen_NT = _choose(router_NX, experts)
    before_NT = torch.ones_like(weight_NT)
    if experts.choice.scales_inputs:
        before_NT, weight_NT = weight_NT, before_NT
    parts_NTD = x_ND.new_empty((*chosen_NT.shape, x_ND.shape[1]))
    for expert in sorted(set(chosen_NT.flatten().tolist())):
        token_n, place_n = torch.where(chosen_NT == expert)
        tile_MD = x_ND.new_zeros((round_up(len(token_n), ROWS), x_ND.shape[1]))
        tile_MD[: len(token_n)] = x_ND[token_n] * before_NT[token_n, place_n].unsqueeze(1)
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
    activation = gelu_mul if experts.is_gelu else silu_mul
    hidden_MF = activation(gate_up_M2F) if clamp is None else clamped_swiglu(gate_up_M2F, clamp)
    y_MD = multiply(hidden_MF, experts.down_DF[expert])
    return y_MD if biases is None else y_MD + biases.down_XD[expert]


def _choose(router_NX: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indexes of each token's experts, in the order in which they are chosen."""
    choice = experts.choice
    if choice.mixer_range is not None:
        weight_NT, chosen_NT = _mix_sparsely(router_NX, experts.num_chosen, choice.mixer_range)
        return weight_NT * choice.factor, chosen_NT
    if choice.is_sigmoid:
        power_NX = row_by_row(torch.sigmoid, router_NX)
        rank_NX = power_NX if choice.bias_X is None else power_NX + choice.bias_X
        if choice.scales_inputs:
            rank_NX = router_NX  # different scores may have the same sigmoid
    else:
        power_NX = row_by_row(torch.exp, router_NX - router_NX.amax(-1, keepdim=True))
        rank_NX = router_NX  # not by weight: different scores may have the same exponential
    if choice.num_groups > 1:
        rank_NX = _of_chosen_groups(rank_NX, choice)
    order_NX = torch.sort(rank_NX, dim=-1, descending=True, stable=True).indices
    chosen_NT = order_NX[:, : experts.num_chosen]
    power_NT = power_NX.gather(1, chosen_NT)
    if experts.normalise:
        power_NT = power_NT / power_NT.sum(-1, keepdim=True)
    elif not choice.is_sigmoid:
        power_NT = power_NT / power_NX.sum(-1, keepdim=True)
    if choice.scale_X is not None:
        power_NT = power_NT * choice.scale_X[chosen_NT]
    return power_NT * choice.factor, chosen_NT


def _mix_sparsely(router_NX: torch.Tensor, num_chosen: int, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Choice.mixer_range`."""
    left_NX, weights, chosen = router_NX, [], []
    for _ in range(num_chosen):
        chosen_N1 = torch.sort(left_NX, dim=-1, descending=True, stable=True).indices[:, :1]
        top_N1 = left_NX.gather(1, chosen_N1)
        is_far_NX = top_N1 - router_NX > most * torch.maximum(router_NX.abs(), top_N1)
        power_NX = row_by_row(torch.exp, left_NX.masked_fill(is_far_NX, -torch.inf) - top_N1)
        weights.append(power_NX.gather(1, chosen_N1) / power_NX.sum(-1, keepdim=True))
        chosen.append(chosen_N1)
        left_NX = left_NX.scatter(1, chosen_N1, -torch.inf)
    return torch.cat(weights, 1), torch.cat(chosen, 1)


def _of_chosen_groups(rank_NX: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return the same ranks, and minus infinity for experts of the other groups."""
    rank_NGX = rank_NX.view(len(rank_NX), choice.num_groups, -1)
    best_NGX = torch.topk(rank_NGX, 2 if choice.is_sigmoid else 1, dim=-1).values
    order_NG = torch.sort(best_NGX.sum(-1), dim=-1, descending=True, stable=True).indices
    others_NG = torch.ones_like(order_NG, dtype=torch.bool).scatter(1, order_NG[:, : choice.num_chosen_groups], False)
    return rank_NGX.masked_fill(others_NG.unsqueeze(-1), -torch.inf).flatten(1)
