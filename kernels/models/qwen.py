"""The configurations of the Qwen families, each a Llama (`llama.py`) with some differences.

Qwen2 and 2.5 (Qwen Team, arXiv:2407.10671 and 2412.15115) have biases on q, k and v, Qwen3 (arXiv:2505.09388) has
normed query and key heads, Qwen3-MoE a mixture of experts as MLP besides.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, MoeConfig, positive, read_sizes, read_windows, same_window
from .rope_config import parse_rope


def parse_qwen2(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data) | {"qkv_bias": True}
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=_read_windows(data))


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
        moe=_parse_moe(data, sizes["num_layers"]),
    )


def _read_windows(data: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window if `use_sliding_window`: by `layer_types`, else from layer `max_window_layers` on."""
    if not data.get("use_sliding_window") or data.get("sliding_window", 4096) is None:
        return same_window(data, None)
    full = data.get("max_window_layers", 28)
    if not isinstance(full, int) or isinstance(full, bool):
        raise ValueError(f"config.json: max_window_layers is {full!r}, must be an integer")
    num_layers = positive(data, "num_hidden_layers")
    kinds = ["full_attention" if index < full else "sliding_attention" for index in range(num_layers)]
    return read_windows(data, kinds, 4096)


def _parse_moe(data: dict[str, Any], num_layers: int) -> MoeConfig:
    """Parse the mixture of experts. Newer files call `num_experts` `num_local_experts`. Raises ValueError."""
    num_experts = positive(data, "num_local_experts" if "num_local_experts" in data else "num_experts")
    num_chosen = positive(data, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_chosen}, must not exceed the number of experts, {num_experts}"
        )
    step = positive(data, "decoder_sparse_step", default=1)
    dense = {int(index) for index in data.get("mlp_only_layers") or ()}
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=positive(data, "moe_intermediate_size"),
        normalise=bool(data.get("norm_topk_prob", False)),
        dense_layers=frozenset(index for index in range(num_layers) if index in dense or (index + 1) % step),
    )
