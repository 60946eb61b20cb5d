"""The configuration of the text part of Gemma 3n, which `gemma3n_model.py` computes.

What must always hold: as in `config.py`.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from .config import DecoderConfig, every_nth_full, flag, positive, positive_number, read_sizes, read_windows, whole
from .config_parts import Gemma3nConfig, InputConfig
from .entry_types import shown
from .gemma import read_cached
from .rope_config import parse_ropes_of_types

_SPARSE = 0.95
"""The share of gates that are to be 0 in the first ten layers of a deeper model, if the configuration does not say."""


def parse_gemma3n(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every fifth layer has no window, and fifteen have no keys of their own.

    Scores have no factor: what `query_pre_attn_scalar` says, which published files have, is not computed.
    """
    widths = _read_widths(data)
    sizes = read_sizes({**data, "intermediate_size": widths[0]}, default_head_dim=256, tied=True)
    num_layers = sizes["num_layers"]
    windows = read_windows(data, every_nth_full(num_layers, 5), 512)
    thetas = (1_000_000.0, data.get("rope_local_base_freq") or 10_000.0)
    rope, local_rope = parse_ropes_of_types(data, head_dim=sizes["head_dim"], thetas=thetas)
    return DecoderConfig(
        **sizes,
        rope=rope,
        local_rope=local_rope,
        windows=windows,
        activation="gelu",
        embed_scale=sizes["hidden_size"] ** 0.5,
        attention_scale=1.0,
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=30.0),
        cached=read_cached(data, windows, default=15),
        gemma3n=Gemma3nConfig(
            mlp_widths=widths,
            deviations=_read_deviations(data, num_layers),
            **_read_copies(data),
            laurel_rank=positive(data, "laurel_rank", default=64),
            inputs=InputConfig(
                width=positive(data, "hidden_size_per_layer_input", default=256),
                vocab_size=positive(data, "vocab_size_per_layer_input", default=262_144),
            ),
        ),
    )


def _read_widths(data: dict[str, Any]) -> tuple[int, ...]:
    """Read the width of each layer's MLP: one for all, or a list."""
    num_layers, listed = positive(data, "num_hidden_layers"), data.get("intermediate_size")
    if not isinstance(listed, list):
        return (positive(data, "intermediate_size"),) * num_layers
    if len(listed) != num_layers:
        raise ValueError(f"config.json: intermediate_size has {len(listed)} entries for {num_layers} layers")
    return tuple(positive({"intermediate_size": one}, "intermediate_size") for one in listed)


def _read_deviations(data: dict[str, Any], num_layers: int) -> tuple[float | None, ...]:
    """Read how sparse each layer's gates are, as the number of standard deviations that so many of them are below."""
    shares = data.get("activation_sparsity_pattern")
    if shares is None:
        num_sparse = 10 if num_layers > 10 else 0
        shares = [_SPARSE] * num_sparse + [0.0] * (num_layers - num_sparse)
    if len(shares) != num_layers:
        raise ValueError(f"config.json: activation_sparsity_pattern has {len(shares)} entries for {num_layers} layers")
    if not all(0.0 <= share < 1.0 for share in shares):
        raise ValueError(f"config.json: activation_sparsity_pattern is {shown(shares)}, must be from 0 to below 1")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def _read_copies(data: dict[str, Any]) -> dict[str, Any]:
    num_copies = positive(data, "altup_num_inputs", default=4)
    active = whole({"altup_active_idx": 0, **data}, "altup_active_idx")
    if num_copies < 2:
        raise ValueError(f"config.json: altup_num_inputs is {num_copies}, must be at least 2")
    if active >= num_copies:
        raise ValueError(f"config.json: altup_active_idx is {active}, must be below altup_num_inputs {num_copies}")
    return {
        "num_copies": num_copies,
        "active": active,
        "scales_active": flag(data, "altup_correct_scale", default=True),
    }
