"""Alternating updates (AltUp: Baykal et al., arXiv:2301.13310) as Gemma 3n has them: copies of the hidden state, side
by side, of which each layer computes one.

Before a layer, all copies are predicted as sums of each other; after it, all are corrected by how far its result is
from what was predicted. The weights of these sums depend on the token, by a router. `gemma3n_model.py` calls this.

What must always hold: as in `decoder_model.py`.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig
from .config_parts import Gemma3nConfig

_FLOOR = 1e-5
"""Least mean square of a copy that is scaled to the magnitude of another."""


@attrs.frozen
class AltUp:
    """The weights of a layer, and constants beside them."""

    router_norm_D: torch.Tensor
    """With the factor of what the router reads."""
    router_CD: torch.Tensor
    prediction_WC: torch.Tensor
    """W: a weight for each copy and each that is added to it."""
    correction_CC: torch.Tensor
    ones_C: torch.Tensor
    minus_11: torch.Tensor


@attrs.frozen
class Projections:
    """What makes copies of an embedding, and one hidden state of copies."""

    to_copies_OD: torch.Tensor
    """All but the first, which is the embedding."""
    from_copies_DD: list[torch.Tensor]
    """Likewise."""
    share_1: torch.Tensor
    """Of each copy in the hidden state."""


def read_altup(weights: Weights, prefix: str, c: DecoderConfig, g: Gemma3nConfig) -> AltUp:
    D, C = c.hidden_size, g.num_copies
    norm_D = weights.tensor(f"{prefix}router_norm.weight", (D,)).float() / D
    return AltUp(
        router_norm_D=norm_D,
        router_CD=weights.tensor(f"{prefix}modality_router.weight", (C, D)),
        prediction_WC=weights.tensor(f"{prefix}prediction_coefs.weight", (C * C, C)),
        correction_CC=weights.tensor(f"{prefix}correction_coefs.weight", (C, C)),
        ones_C=norm_D.new_ones(C),
        minus_11=norm_D.new_tensor([[-1.0]]),
    )


def read_projections(weights: Weights, c: DecoderConfig, g: Gemma3nConfig, like: torch.Tensor) -> Projections:
    """Read them; constants are on the device of `like`."""
    D, others = c.hidden_size, range(g.num_copies - 1)
    return Projections(
        to_copies_OD=weights.fused([(f"model.altup_projections.{index}.weight", (D, D)) for index in others]),
        from_copies_DD=[weights.tensor(f"model.altup_unembed_projections.{index}.weight", (D, D)) for index in others],
        share_1=torch.full((1,), 1 / g.num_copies, dtype=torch.float32, device=like.device),
    )


def start_copies(x_ND: torch.Tensor, projections: Projections, ops: Ops) -> torch.Tensor:
    """Return the embedding and its copies: x_NCD."""
    y_NO = ops.linear(x_ND, projections.to_copies_OD)
    return ops.match_copies(x_ND, y_NO.view(y_NO.shape[0], -1, x_ND.shape[1]), _FLOOR)


def merge_copies(x_NCD: torch.Tensor, projections: Projections, ops: Ops) -> torch.Tensor:
    """Return the mean of what is made of all copies: x_ND."""
    first_ND = total_ND = x_NCD[:, 0]
    for copy, matrix_DD in enumerate(projections.from_copies_DD, 1):
        y_ND = ops.linear(x_NCD[:, copy], matrix_DD)
        total_ND = ops.add(total_ND, ops.match_copies(first_ND, y_ND.unsqueeze(1), _FLOOR)[:, 1])
    return ops.scale(total_ND, projections.share_1)


def predict(x_NCD: torch.Tensor, altup: AltUp, active: int, eps: float, ops: Ops) -> torch.Tensor:
    """Return the predicted copies: x_NCD."""
    copies = x_NCD.shape[1]
    weights_NW = ops.linear(_route(x_NCD[:, active], altup, eps, ops), altup.prediction_WC)
    return ops.mix_copies(x_NCD, weights_NW.view(weights_NW.shape[0], copies, copies), x_NCD)


def correct(
    predicted_NCD: torch.Tensor, y_ND: torch.Tensor, altup: AltUp, active: int, eps: float, ops: Ops
) -> torch.Tensor:
    """Return the copies, corrected by a layer's result, y: x_NCD."""
    weights_NC = ops.linear(_route(y_ND, altup, eps, ops), altup.correction_CC, altup.ones_C)
    error_N1D = ops.mix_copies(y_ND.unsqueeze(1), altup.minus_11, predicted_NCD[:, active : active + 1])
    return ops.mix_copies(predicted_NCD, weights_NC.unsqueeze(2), error_N1D)


def _route(x_ND: torch.Tensor, altup: AltUp, eps: float, ops: Ops) -> torch.Tensor:
    routed_NC = ops.linear(ops.rms_norm(x_ND, altup.router_norm_D, eps), altup.router_CD)
    return ops.soft_cap(routed_NC, 1.0)
