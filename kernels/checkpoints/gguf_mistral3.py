"""The entries of `config.json` that only GGUF files of Mistral Small 3.1 and of Ministral 3 have. No torch.

`gguf_specifics.py` calls `read_mistral3`. Both have one name there; queries of Ministral 3 grow with their positions.

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

from typing import Any

from .gguf_file import GgufFile
from .gguf_keys import Keys


def read_mistral3(file: GgufFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries; changes those of the rotary embedding. Raises ValueError naming a key."""
    window, scale = keys.take("attention.sliding_window") or None, keys.number("attention.temperature_scale", 0)
    if not scale:
        return {"sliding_window": window}
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise ValueError(f"key 'mistral3.rope.scaling.type' is {rope['rope_type']}, must be yarn with temperatures")
    floor = rope["original_max_position_embeddings"]
    if keys.whole("attention.temperature_length", floor) not in (0, floor):
        raise ValueError(f"key 'mistral3.attention.temperature_length' is not {floor}, the original context length")
    rope |= {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0)}
    rope["llama_4_scaling_beta"] = scale
    return {"architectures": ["Ministral3ForCausalLM"], "sliding_window": window}
