"""The configurations of families whose norms subtract the mean (LayerNorm).

Command R7B (Cohere, arXiv:2504.00698) adds attention and MLP of the same norm; layers with a window are rotated, the
others are not. StableLM 2 (Bellagente et al., arXiv:2402.17834) rotates a part of each head. StarCoder2 (Lozhkov et
al., arXiv:2402.19173) has biases in all products, and MLPs without a gate. Phi-3.5-MoE (Microsoft, arXiv:2404.14219)
chooses two experts with SparseMixer. `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

from .config import (
    DecoderConfig,
    NormNames,
    every_nth_full,
    flag,
    positive,
    positive_number,
    read_sizes,
    read_windows,
    same_window,
)
from .config_parts import ExpertChoice, MlpNames, MoeConfig
from .mixtures import check_values
from .rope_config import parse_rope, rope_entries

_ONE_NORM = NormNames(before_mlp=None)


def parse_cohere2(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every fourth layer has no window."""
    sizes = _read_sizes(data, "layer_norm_eps", every_head_its_kv=True, tied=True)
    check_values(
        data,
        head_dim=sizes["head_dim"],
        use_parallel_block=True,
        use_gated_activation=True,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
    )
    if data.get("sliding_window", 4096) is None:
        raise ValueError("config.json: sliding_window is null, must be a positive integer for this architecture")
    every = 4 if data.get("layer_types") else positive(data, "sliding_window_pattern", default=4)
    windows = read_windows(data, every_nth_full(sizes["num_layers"], every), 4096)
    scale = positive_number(data, "logit_scale", default=0.0625)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], is_interleaved=True),
        windows=windows,
        unrotated=frozenset(index for index, window in enumerate(windows) if window is None),
        norms=_ONE_NORM,
        norms_center=True,
        is_parallel=True,
        logits_divisor=1.0 / (0.0625 if scale is None else scale),
    )


def parse_stablelm(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. A quarter of each head is rotated by default."""
    sizes = _read_sizes(data, "layer_norm_eps")
    check_values(data, head_dim=sizes["head_dim"])
    sizes["qkv_bias"] = flag(data, "use_qkv_bias", default=False)
    is_parallel = flag(data, "use_parallel_residual", default=False)
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], partial=True, default_share=0.25),
        windows=same_window(data, None),
        norms=_ONE_NORM if is_parallel else NormNames(),
        norms_center=True,
        norms_have_biases=True,
        is_parallel=is_parallel,
    )


def parse_starcoder2(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `use_bias` is that of all products, and true by default."""
    sizes = _read_sizes(data, "norm_epsilon", tied=True)
    check_values(data, mlp_type="default", norm_type="layer_norm")
    has_biases = flag(data, "use_bias", default=True)
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    return DecoderConfig(
        **sizes | {"qkv_bias": has_biases, "o_bias": has_biases},
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=same_window(data, window),
        norms_center=True,
        norms_have_biases=True,
        activation="gelu",
        mlp_is_gated=False,
        mlp_bias=has_biases,
    )


def parse_phimoe(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. SparseMixer always chooses two experts; `short_mscale` is longrope's attention factor."""
    check_values(data, num_experts_per_tok=2)
    sizes = read_sizes(data, rms_norm_eps=1e-5)
    entries = rope_entries(data)
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported for this architecture, only 'longrope'")
    if kind == "longrope":
        entries.pop("long_mscale", None)
        entries["attention_factor"] = entries.pop("short_mscale", None)
        if entries["attention_factor"] is None:
            raise ValueError("config.json: rope_type 'longrope' requires short_mscale for this architecture")
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    noise = positive_number(data, "router_jitter_noise", default=0.01)
    if noise is None:
        raise ValueError("config.json: router_jitter_noise is null, must be a positive number")
    num_experts = positive(data, "num_local_experts" if "num_local_experts" in data else "num_experts")
    if num_experts < 2:
        raise ValueError(f"config.json: num_local_experts is {num_experts}, must be at least 2")
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"], entries=entries, default_theta=1_000_000.0),
        windows=same_window(data, window),
        norms_center=True,
        norms_have_biases=True,
        head_bias=flag(data, "lm_head_bias", default=False),
        mlp_name="block_sparse_moe",
        moe=MoeConfig(
            num_experts=num_experts,
            num_chosen=2,
            intermediate_size=sizes["intermediate_size"],
            normalise=False,
            dense_layers=frozenset(),
            choice=ExpertChoice(mixer_range=2 * noise),
            names=MlpNames(gate="w1", up="w3", down="w2"),
        ),
    )


def _read_sizes(data: dict[str, Any], epsilon: str, **defaults: bool) -> dict[str, Any]:
    """Read the entries that all decoders have; `epsilon` names that of norms."""
    if data.get(epsilon, 1e-5) is None:
        raise ValueError(f"config.json: {epsilon} is null, must be a positive number")
    eps = positive_number(data, epsilon, default=1e-5)
    own_head_dim = {**data, "head_dim": None, "rms_norm_eps": eps}
    return read_sizes(own_head_dim, **defaults)
