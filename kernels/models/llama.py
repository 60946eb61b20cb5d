"""The configurations of the Llama family, and of families that differ from it in a few entries.

Llama 2 and 3 (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783), Falcon 3, Mistral (Jiang et al.,
arXiv:2310.06825), Ministral and Ministral 3 (Mistral AI, 2025), Phi-3 and Phi-4 (Microsoft, arXiv:2404.14219 and
2412.08905), SmolLM3 (Hugging Face), Seed-OSS (ByteDance). `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, flag, positive, read_flags, read_sizes, read_windows, same_window
from .config_parts import MlpNames, Temperature
from .entry_types import is_number, shown
from .rope_config import parse_rope, rope_entries

_ROPE_OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse_llama(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data, every_head_its_kv=True)
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=same_window(data, None))


def parse_mistral(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `sliding_window` defaults to 4,096, as in the first Mistral; later ones set it to null."""
    sizes = read_sizes(data)
    rope = parse_rope(data, head_dim=sizes["head_dim"])
    return DecoderConfig(**sizes, rope=rope, windows=same_window(data, _mistral_window(data)))


def parse_ministral(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`: Mistral, but for layers without a window by `layer_types`."""
    sizes = read_sizes(data)
    kind = "full_attention" if _mistral_window(data) is None else "sliding_attention"
    windows = read_windows(data, [kind] * sizes["num_layers"], 4096)
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=windows)


def parse_ministral3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`: Mistral without a window by default, whose queries grow with their positions.

    By how much, and from which length on, is said among the rotary entries, as for YaRN.
    """
    sizes = read_sizes(data, default_head_dim=128, rms_norm_eps=1e-5)
    entries = rope_entries(data) or dict(_ROPE_OF_MINISTRAL3)
    entries.pop("max_position_embeddings", None)  # a copy
    scale: Any = entries.pop("llama_4_scaling_beta", None)
    floor: Any = entries.get("original_max_position_embeddings")
    if not is_number(scale) or scale < 0:
        raise ValueError(f"config.json: llama_4_scaling_beta is {shown(scale)}, must be a number, 0 or more")
    if not is_number(floor) or floor <= 0:
        raise ValueError(f"config.json: original_max_position_embeddings is {shown(floor)}, must be a positive number")
    if (entries.get("rope_type") or entries.get("type") or "default") in ("default", "linear"):
        del entries["original_max_position_embeddings"]
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], entries=entries),
        windows=same_window(data, window),
        temperature=Temperature(floor, scale, first=0),
    )


def _mistral_window(data: dict[str, Any]) -> int | None:
    return None if data.get("sliding_window", 4096) is None else positive(data, "sliding_window", default=4096)


def parse_phi3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `su` and `yarn` in older configurations mean `longrope`, as in transformers."""
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    entries = rope_entries(data)
    if (entries.get("rope_type") or entries.get("type")) in ("su", "yarn"):
        entries["rope_type"] = "longrope"
    rope = parse_rope(data, head_dim=sizes["head_dim"], entries=entries, partial=True)
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    return DecoderConfig(
        **sizes,
        rope=rope,
        windows=same_window(data, window),
        qkv_is_stored_fused=True,
        mlp_names=MlpNames(gate_up="gate_up_proj"),
    )


def parse_smollm3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Layers without a rotary embedding are 0 in `no_rope_layers`; by default every fourth."""
    sizes = read_sizes(data, tied=True)
    num_layers = sizes["num_layers"]
    every = positive(data, "no_rope_layer_interval", default=4)
    rotated = read_flags(data, "no_rope_layers", [(index + 1) % every != 0 for index in range(num_layers)])
    slides = bool(data.get("use_sliding_window")) and data.get("sliding_window") is not None
    kinds = ["full_attention" if is_rotated else "sliding_attention" for is_rotated in rotated]
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], default_theta=2_000_000.0),
        windows=read_windows(data, kinds, None) if slides else same_window(data, None),
        unrotated=frozenset(index for index, is_rotated in enumerate(rotated) if not is_rotated),
    )


def parse_seed_oss(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. q, k and v have biases by default; `attention_out_bias` says whether o has one."""
    sizes = read_sizes(data, default_head_dim=128)
    sizes["qkv_bias"] = flag(data, "attention_bias", default=True)
    sizes["o_bias"] = flag(data, "attention_out_bias", default=False)
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=same_window(data, None))
