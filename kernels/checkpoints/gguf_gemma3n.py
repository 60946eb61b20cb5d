"""The entries of `config.json` that only GGUF files of Gemma 3n have. No torch.

`gguf_specifics.py` calls `read_gemma3n`. What such files do not say is seen by their tensors' shapes, or what llama.cpp
computes.

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from .gguf_file import GgufFile, shown
from .gguf_keys import Keys

_PERIOD = 5
"""Layers of which one has no window, if a file does not list them."""


def read_gemma3n(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries. Raises ValueError naming a key or tensor."""
    num_layers = config["num_hidden_layers"]
    slides = keys.take("attention.sliding_window_pattern", [(index + 1) % _PERIOD != 0 for index in range(num_layers)])
    if not isinstance(slides, list) or len(slides) != num_layers:
        raise ValueError(f"key 'gemma3n.attention.sliding_window_pattern' is {shown(slides)}, must list all layers")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": keys.each("feed_forward_length", num_layers),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": keys.whole("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": keys.whole("attention.shared_kv_layers"),
        "activation_sparsity_pattern": _read_shares(keys, num_layers),
        "altup_active_idx": keys.whole("altup.active_idx"),
        "altup_num_inputs": keys.whole("altup.num_inputs"),
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _num_rows(file, "per_layer_token_embd.weight"),
        "laurel_rank": _num_rows(file, "blk.0.laurel_l.weight"),
    }


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ValueError(f"it lacks tensor {name}")
    return file.tensors[name].shape[0]


def _read_shares(keys: Keys, num_layers: int) -> list[float]:
    """Return the share of gates that are 0 in each layer, of which files have the deviations from the mean."""
    deviations = keys.take("activation_sparsity_scale")
    is_list = isinstance(deviations, list) and len(deviations) == num_layers
    if not is_list or not all(isinstance(one, float) and one < math.inf for one in deviations):
        raise ValueError(
            f"key 'gemma3n.activation_sparsity_scale' is {shown(deviations)}, must be {num_layers} numbers"
        )
    return [0.0 if one == -math.inf else _share_of(one) for one in deviations]


def _share_of(deviations: float) -> float:
    """Return the share of normal values below so many deviations, with as few digits as are enough for float32."""
    normal = NormalDist()
    share = normal.cdf(deviations)
    shorter = (round(share, digits) for digits in range(1, 8))
    within = 1e-6 * max(1.0, abs(deviations))
    return next((one for one in shorter if 0 < one < 1 and abs(normal.inv_cdf(one) - deviations) < within), share)
