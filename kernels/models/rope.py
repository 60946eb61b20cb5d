"""Rotary tables: cosine and sine of every position, made once at load and read by every family.

What must always hold: a position's row depends on the configuration only, so that a token is turned by the same
bits whether it is prefilled, decoded or computed again.
"""

from __future__ import annotations

import math

import torch

from quipu.kernels.models.config import DecoderConfig, Llama3Scaling


class RopeTable:
    """Cosines and sines for positions 0 to `num_positions`, exclusive, in float32."""

    def __init__(self, config: DecoderConfig, num_positions: int) -> None:
        exponent_R = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequency_R = 1.0 / config.rope_theta**exponent_R
        if config.rope_scaling is not None:
            frequency_R = _scale_llama3(frequency_R, config.rope_scaling)
        angle_PR = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency_R)
        self.cos_PR, self.sin_PR = angle_PR.cos(), angle_PR.sin()

    def at(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(cos_NR, sin_NR)`; raises IndexError past the table."""
        return self.cos_PR[positions_N], self.sin_PR[positions_N]


def _scale_llama3(frequency_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow the low frequencies by `factor`, keep the high ones, blend between (Llama 3.1 reference code).

    A frequency is judged by how many turns it makes within the original context: below `low_freq_factor` turns it is
    low, above `high_freq_factor` high, and the blend is linear in that number.
    """
    turns_R = scaling.original_max_position_embeddings * frequency_R / (2 * math.pi)
    keep_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_R = keep_R.clamp(0.0, 1.0)
    return frequency_R * keep_R + frequency_R / scaling.factor * (1.0 - keep_R)
