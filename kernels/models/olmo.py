"""The configurations of the OLMo families, and of others that norm what attention and MLP return.

OLMo 2 (Walsh et al., arXiv:2501.00656) norms all query heads of a token together, and all key heads. OLMo 3
(Ettinger et al., arXiv:2512.13961) adds windows in three layers of four, whose rotary embedding YaRN does not scale.
OLMoE (Muennighoff et al., arXiv:2409.02060) norms projections as well, but what its layers read, as Llama does.
EXAONE 4 (LG AI Research, arXiv:2507.11407) norms each head; with windows, the other layers have no rotary embedding.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, NormNames, every_nth_full, positive, read_sizes, read_windows, same_window
from .mixtures import parse_moe
from .rope_config import parse_rope, parse_ropes_of_types

_AFTER = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def parse_olmo2(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=same_window(data, None),
        norms=_AFTER,
        norms_projections=True,
    )


def parse_olmoe(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=same_window(data, None),
        norms_projections=True,
        moe=parse_moe({**data, "moe_intermediate_size": sizes["intermediate_size"]}, sizes["num_layers"]),
    )


def parse_olmo3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every fourth layer has no window."""
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    rope, local_rope = parse_ropes_of_types(data, head_dim=sizes["head_dim"], thetas=(500_000.0, 500_000.0))
    return DecoderConfig(
        **sizes,
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(data, every_nth_full(sizes["num_layers"], 4), 4096),
        norms=_AFTER,
        norms_projections=True,
    )


def parse_exaone4(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `sliding_window` null: no layer has a window, and all are rotated."""
    sizes = read_sizes(data, rms_norm_eps=1e-5)
    if data.get("sliding_window", 4096) is None:
        windows, unrotated = same_window(data, None), frozenset[int]()
    else:
        # beside `layer_types`, the pattern may be letters
        every = 4 if data.get("layer_types") else positive(data, "sliding_window_pattern", default=4)
        windows = read_windows(data, every_nth_full(sizes["num_layers"], every), 4096)
        unrotated = frozenset(index for index, window in enumerate(windows) if window is None)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=windows,
        unrotated=unrotated,
        norms=_AFTER,
        norms_heads=True,
    )
