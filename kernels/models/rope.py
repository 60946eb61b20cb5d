"""Tables of rotary embeddings: cosine and sine of every position, computed once at load; and of factors of positions.

What must always hold: a position's row depends on the configuration only, so that a token is rotated by the same bits
whether it is prefilled, decoded or recomputed.
"""

from __future__ import annotations

import math

import torch

from ..machine import memory
from ..ops import RopeTable
from .config_parts import Temperature
from .rope_config import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, ShortFactors, YarnScaling


def make_rope_table(rope: Rope, num_positions: int, factor_P: torch.Tensor | None = None) -> RopeTable:
    """Compute the table of positions 0 to `num_positions`, exclusive.

    `factor_P`: what heads at each position are multiplied with, too. Raises ValueError for a table that this machine's
    memory could not hold.
    """
    num_bytes, total = num_positions * rope.width * 4, memory().total
    if num_bytes > total:
        raise ValueError(
            f"the rotary embedding of {num_positions} positions of {rope.width} elements takes {num_bytes >> 30} GiB, "
            f"this machine has {total >> 30} GiB: lower --max-model-len"
        )
    frequency_R = 1.0 / rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width)
    factor = 1.0
    match rope.scaling:
        case LinearScaling():
            frequency_R = frequency_R / rope.scaling.factor
        case Llama3Scaling():
            frequency_R = _scale_llama3(frequency_R, rope.scaling)
        case YarnScaling():
            frequency_R = _scale_yarn(frequency_R, rope, rope.scaling)
            factor = rope.scaling.attention_factor
        case ProportionalScaling():
            frequency_R = frequency_R / rope.scaling.factor
            frequency_R[rope.scaling.num_rotating :] = 0.0
        case ShortFactors():
            frequency_R = frequency_R / torch.tensor(rope.scaling.factors, dtype=torch.float32)
            factor = rope.scaling.attention_factor
    angle_PR = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency_R)
    factor_P1 = torch.tensor(factor) if factor_P is None else factor * factor_P.unsqueeze(1)
    return RopeTable(angle_PR.cos() * factor_P1, angle_PR.sin() * factor_P1, rope.is_interleaved)


def position_factors(temperature: Temperature | None, num_positions: int) -> torch.Tensor | None:
    """Return the factor of each position's queries; None if all are 1."""
    if temperature is None:
        return None
    number_P = torch.arange(num_positions, dtype=torch.float32) + temperature.first
    factor_P = torch.log1p(torch.floor(number_P / temperature.floor)) * temperature.scale + 1.0
    return None if bool((factor_P == 1.0).all()) else factor_P


def make_factor_table(factor_P: torch.Tensor, head_dim: int) -> RopeTable:
    """Return a table that multiplies whole heads with their position's factor, since its sines are 0."""
    factor_PR = factor_P.unsqueeze(1).repeat(1, head_dim // 2)
    return RopeTable(factor_PR, torch.zeros_like(factor_PR))


def _scale_llama3(frequency_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow the low frequencies by `factor`, keep the high ones, blend between (Llama 3.1 reference code).

    A frequency is classified by its number of rotations within the original context: below `low_freq_factor` it is
    low, above `high_freq_factor` high, and the blend is linear in that number.
    """
    rotations_R = scaling.original_max_position_embeddings * frequency_R / (2 * math.pi)
    keep_R = (rotations_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_R = keep_R.clamp(0.0, 1.0)
    return frequency_R * keep_R + frequency_R / scaling.factor * (1.0 - keep_R)


def _scale_yarn(frequency_R: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    """Slow the low frequencies by `factor`, keep the high ones, blend between ("NTK by parts", arXiv:2309.00071).

    The blend is linear in the frequency's index, from the one with `beta_fast` rotations within the original context to
    the one with `beta_slow`.
    """

    def index_of(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope.width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    index_R = torch.arange(len(frequency_R), dtype=torch.float32)
    slow_R = ((index_R - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return frequency_R / scaling.factor * slow_R + frequency_R * (1.0 - slow_R)
