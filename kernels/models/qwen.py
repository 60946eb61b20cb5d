"""The configurations of the Qwen families, each a Llama (`llama.py`) with some differences.

Qwen2 and 2.5 (Qwen Team, arXiv:2407.10671 and 2412.15115) have biases on q, k and v, Qwen3 (arXiv:2505.09388) has
normed query and key heads. The MLPs of Qwen2-MoE and Qwen3-MoE are mixtures of experts; the former adds a shared one.
"""

from __future__ import annotations

from typing import Any

import attrs

from .config import DecoderConfig, flag, positive, read_sizes, read_windows, same_window
from .mixtures import parse_moe
from .rope_config import parse_rope


def parse_qwen2(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data) | {"qkv_bias": True}
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=_read_windows(data))


def parse_qwen2_moe(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every second layer before `max_window_layers` has a window, if any has one."""
    sizes = read_sizes(data) | {"qkv_bias": flag(data, "qkv_bias", default=True)}
    num_layers, below = sizes["num_layers"], _read_max_window_layers(data)
    kinds = ["full_attention" if index % 2 or index >= below else "sliding_attention" for index in range(num_layers)]
    slides = data.get("use_sliding_window") and data.get("sliding_window", 4096) is not None
    moe = parse_moe(data, num_layers)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=read_windows(data, kinds, 4096) if slides else same_window(data, None),
        moe=attrs.evolve(
            moe,
            shared_intermediate_size=positive(data, "shared_expert_intermediate_size"),
            shared_name="mlp.shared_expert",
        ),
    )


def parse_qwen3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `head_dim` defaults to 128, as in transformers, not to hidden size over heads."""
    sizes = read_sizes(data, default_head_dim=128)
    rope = parse_rope(data, head_dim=sizes["head_dim"])
    return DecoderConfig(**sizes, rope=rope, windows=_read_windows(data), norms_heads=True)


def parse_qwen3_moe(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. A window applies to all layers."""
    sizes = read_sizes(data)
    window = positive(data, "sliding_window", default=4096) if data.get("use_sliding_window") else None
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=same_window(data, window),
        norms_heads=True,
        moe=parse_moe(data, sizes["num_layers"]),
    )


def _read_windows(data: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window if `use_sliding_window`: by `layer_types`, else from layer `max_window_layers` on."""
    if not data.get("use_sliding_window") or data.get("sliding_window", 4096) is None:
        return same_window(data, None)
    num_layers, full = positive(data, "num_hidden_layers"), _read_max_window_layers(data)
    kinds = ["full_attention" if index < full else "sliding_attention" for index in range(num_layers)]
    return read_windows(data, kinds, 4096)


def _read_max_window_layers(data: dict[str, Any]) -> int:
    value = data.get("max_window_layers", 28)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json: max_window_layers is {value!r}, must be an integer")
    return value
