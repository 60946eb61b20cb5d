"""The entries of `config.json` that only GGUF files of Gemma 4 have. No torch.

`gguf_specifics.py` calls `read_gemma4`. Heads and widths of MLPs may be lists with a number for each layer.

What must always hold: a list that the configuration cannot say is refused by name.
"""

from __future__ import annotations

from typing import Any

from .gguf_file import GgufFile, shown
from .gguf_keys import Keys

_STILL = 1e30
"""The factor that frequencies are divided by which do not rotate."""


def read_gemma4(file: GgufFile, keys: Keys, config: dict[str, Any], frequencies: list[float] | None) -> dict[str, Any]:
    """Return the entries; `frequencies` are the factors of layers without a window. Raises ValueError naming a key."""
    slides = keys.take("attention.sliding_window_pattern")
    num_layers = config["num_hidden_layers"]
    if not isinstance(slides, list) or len(slides) != num_layers:
        raise ValueError(f"key 'gemma4.attention.sliding_window_pattern' is {shown(slides)}, must list all layers")
    num_shared = keys.whole("attention.shared_kv_layers", 0)
    head_dim = keys.whole("attention.key_length")
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise ValueError("key 'gemma4.attention.value_length' differs from attention.key_length")
    own_full = [index for index, one in enumerate(slides) if not one and index < num_layers - num_shared]
    values_are_keys = bool(own_full) and f"blk.{own_full[0]}.attn_v.weight" not in file.tensors
    num_kv_heads = keys.each("attention.head_count_kv", num_layers)
    narrow, full = (_one_of(num_kv_heads, slides, kind, config["num_key_value_heads"]) for kind in (True, False))
    if narrow is None or full is None or (narrow != full and not values_are_keys):
        raise ValueError(f"key 'gemma4.attention.head_count_kv' {shown(num_kv_heads)} is not supported")
    inputs = file.tensors.get("per_layer_token_embd.weight")
    num_experts = keys.whole("expert_count", 0)
    moe = {
        "num_experts": num_experts,
        "top_k_experts": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": narrow,
        "global_head_dim": head_dim,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": values_are_keys,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": _is_wide(keys, num_layers, num_shared),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": keys.whole("attention.sliding_window"),
        "final_logit_softcapping": keys.take("final_logit_softcapping"),
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if inputs is None else inputs.shape[0],
        **({"enable_moe_block": True, **moe} if num_experts else {}),
        "rope_parameters": _rope(keys, config["head_dim"], head_dim, frequencies),
    }


def _one_of(numbers: list[int], slides: list[bool], kind: bool, usual: int) -> int | None:
    """Return the number of all layers that slide or do not, `usual` if there are none; None if they differ."""
    found = {number for number, one in zip(numbers, slides, strict=True) if bool(one) == kind} or {usual}
    return found.pop() if len(found) == 1 else None


def _is_wide(keys: Keys, num_layers: int, num_shared: int) -> bool:
    """Return whether MLPs of layers without keys of their own have twice the width. Raises ValueError for others."""
    widths = keys.each("feed_forward_length", num_layers)
    own, rest = widths[: num_layers - num_shared], widths[num_layers - num_shared :]
    if len(set(own)) == 1 and set(rest) <= {2 * own[0]} and rest:
        return True
    if len(set(widths)) > 1:
        raise ValueError(f"key 'gemma4.feed_forward_length' {shown(widths)} is not supported")
    return False


def _rope(keys: Keys, narrow: int, head_dim: int, frequencies: list[float] | None) -> dict[str, Any]:
    """Return the rotary embeddings: whole heads where there is a window, in the others the first frequencies."""
    for name, width in (("rope.dimension_count", head_dim), ("rope.dimension_count_swa", narrow)):
        if keys.whole(name, width) != width:
            raise ValueError(f"key 'gemma4.{name}' is {keys.whole(name)}, only {width} is supported")
    if keys.take("rope.scaling.type", "none") != "none":
        raise ValueError(f"key 'gemma4.rope.scaling.type' is {shown(keys.take('rope.scaling.type'))}, not supported")
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 1_000_000.0)}
    if frequencies is not None:
        num_rotating = sum(one == 1.0 for one in frequencies)
        still = [_STILL] * (len(frequencies) - num_rotating)
        if frequencies != [1.0] * num_rotating + still or len(frequencies) != head_dim // 2 or not num_rotating:
            raise ValueError("tensor rope_freqs.weight must have ones, and 1e30 behind them")
        full |= {"rope_type": "proportional", "partial_rotary_factor": 2 * num_rotating / head_dim}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": full, "sliding_attention": local}
