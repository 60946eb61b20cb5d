"""Launch the kernels of a mixture of experts over one pass's tokens, and those of heads with a matrix of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

import triton

from ..ops import Choice, Experts
from .configs import Tiles
from .experts import pairs_linear_kernel, route_kernel, weigh_kernel

_BLOCK = 1024


class Addresses:
    """Addresses of experts' matrices, on the device; made once for each list of matrices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Sequence[torch.Tensor], torch.Tensor]] = {}

    def of(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the addresses, int64, one per expert."""
        if id(matrices) not in self._made:
            places = torch.tensor([matrix.data_ptr() for matrix in matrices], dtype=torch.int64, device=self._device)
            self._made[id(matrices)] = (matrices, places)
        return self._made[id(matrices)][1]


@attrs.frozen
class _Pairs:
    """Token n's j-th expert is pair n * CHOSEN + j."""

    order: torch.Tensor
    pair_ends: torch.Tensor
    tile_ends: torch.Tensor


def mix(
    x_ND: torch.Tensor,
    router_NX: torch.Tensor,
    experts: Experts,
    addresses: Addresses,
    tiles: Tiles,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """See `Ops.experts`: y_ND."""
    (num_tokens, width), num_experts, num_chosen = x_ND.shape, router_NX.shape[1], experts.num_chosen
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=x_ND.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=x_ND.device)
    route_kernel[(num_tokens,)](
        router_NX, chosen, weights, router_NX.stride(0), num_experts, num_chosen, triton.next_power_of_2(num_chosen),
        experts.normalise, triton.next_power_of_2(num_experts), *_choice(experts.choice, router_NX),
        enable_fp_fusion=tiles.fusion,
    )  # fmt: skip
    pairs = _by_expert(chosen.view(-1), num_experts, tiles.linear.rows)
    biases = experts.biases
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up_XO, biases.down_XD)
    pairs_a_row = num_chosen
    if experts.choice.scales_inputs:
        x_ND, pairs_a_row = (x_ND.unsqueeze(1) * weights.unsqueeze(2)).to(x_ND.dtype).flatten(0, 1), 1
        weights = torch.ones_like(weights)
    gate_up_P2F = _multiply(x_ND, experts.gate_up_OD, gate_up_bias, pairs, pairs_a_row, addresses, tiles)
    down_PD = _multiply(activation(gate_up_P2F), experts.down_DF, down_bias, pairs, 1, addresses, tiles)
    y_ND = x_ND.new_empty((num_tokens, width))
    block = min(_BLOCK, triton.next_power_of_2(width))
    weigh_kernel[(num_tokens, triton.cdiv(width, block))](
        down_PD, weights, y_ND, num_chosen, width, block, enable_fp_fusion=tiles.fusion
    )
    return y_ND


def _choice(choice: Choice, router_NX: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    """Return the last arguments of `route_kernel`."""
    biased = choice.bias_X is not None
    bias = router_NX if choice.bias_X is None else choice.bias_X
    groups, mixes = (choice.num_groups, choice.num_chosen_groups), choice.mixer_range is not None
    scale = router_NX if choice.scale_X is None else choice.scale_X
    rest = (choice.mixer_range or 0.0, mixes, scale, choice.scale_X is not None, choice.scales_inputs)
    return bias, choice.factor, choice.is_sigmoid, biased, *groups, *rest


def multiply_heads(
    x_NHE: torch.Tensor, weights_OI: list[torch.Tensor], first: int, addresses: Addresses, tiles: Tiles
) -> torch.Tensor:
    """See `Ops.linear_heads`: a head is an expert of all tokens."""
    num_tokens, num_heads, _ = x_NHE.shape
    last, rows = first + weights_OI[0].shape[1], tiles.linear.rows
    x_NHE = x_NHE.contiguous()
    pairs_NH = torch.arange(num_tokens * num_heads, dtype=torch.int32, device=x_NHE.device).view(num_tokens, num_heads)
    ends = torch.arange(1, num_heads + 1, dtype=torch.int32, device=x_NHE.device)
    pairs = _Pairs(pairs_NH.t().reshape(-1), ends * num_tokens, ends * triton.cdiv(num_tokens, rows))
    y_PO = _multiply(x_NHE.flatten(0, 1)[:, first:last], weights_OI, None, pairs, 1, addresses, tiles)
    return torch.cat([x_NHE[..., last:], y_PO.view(num_tokens, num_heads, -1)], dim=-1)


def _by_expert(chosen_P: torch.Tensor, num_experts: int, rows: int) -> _Pairs:
    """Sort pairs by expert (stable), and find where each expert's pairs and tiles end (exclusive)."""
    sorted_P = torch.sort(chosen_P, stable=True)
    every = torch.arange(num_experts, dtype=torch.int32, device=chosen_P.device)
    pair_ends = torch.searchsorted(sorted_P.values, every, right=True)
    counts = torch.diff(pair_ends, prepend=pair_ends.new_zeros(1))
    tile_ends = torch.cumsum((counts + rows - 1) // rows, 0)
    return _Pairs(sorted_P.indices.to(torch.int32), pair_ends.to(torch.int32), tile_ends.to(torch.int32))


def _multiply(
    x_MI: torch.Tensor, matrices: Sequence[torch.Tensor], bias_XO: torch.Tensor | None, pairs: _Pairs,
    pairs_a_row: int, addresses: Addresses, tiles: Tiles,
) -> torch.Tensor:  # fmt: skip
    """Multiply each pair's row with its expert's matrix, and add its bias: y_PO."""
    num_out, num_in = matrices[0].shape
    num_experts, num_pairs = len(matrices), pairs.order.shape[0]
    y_PO = x_MI.new_empty((num_pairs, num_out))
    most_tiles = min(num_pairs, num_pairs // tiles.linear.rows + num_experts)
    pairs_linear_kernel[(most_tiles, triton.cdiv(num_out, tiles.columns))](
        x_MI, addresses.of(matrices), pairs.order, pairs.pair_ends, pairs.tile_ends,
        y_PO if bias_XO is None else bias_XO, y_PO, x_MI.shape[0], x_MI.stride(0), bias_XO is not None, num_experts,
        triton.next_power_of_2(num_experts), pairs_a_row, num_in, num_out,
        tiles.linear.rows, tiles.columns, tiles.depth, tiles.slice, num_warps=tiles.linear.num_warps,
        num_stages=tiles.linear.num_stages, enable_fp_fusion=tiles.fusion,
    )  # fmt: skip
    return y_PO
