"""The configuration of the decoder in a model that also reads images or sound, and is served as that decoder. No torch.

`families.py` parses what `text_part` returns; `actors/shared/checkpoint.py` needs the defaults, too.

What must always hold: a decoder of another family than what the model is known to have is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .entry_types import check_types, shown


@attrs.frozen
class Decoder:
    """The decoder of a model with towers."""

    architecture: str
    model_type: str
    defaults: Mapping[str, int] = attrs.field(factory=dict)
    """Of entries that published configurations leave out."""


_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
WITH_TOWERS = {
    "Gemma3ForConditionalGeneration": (Decoder("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),),
    "Gemma3nForConditionalGeneration": (Decoder("Gemma3nForCausalLM", "gemma3n_text"),),
    "Gemma4ForConditionalGeneration": (Decoder("Gemma4ForCausalLM", "gemma4_text"),),
    "Llama4ForConditionalGeneration": (Decoder("Llama4ForCausalLM", "llama4_text"),),
    "Mistral3ForConditionalGeneration": (
        Decoder("MistralForCausalLM", "mistral"),
        Decoder("Ministral3ForCausalLM", "ministral3"),
    ),
}
"""Models with towers, and what may decode in them; the first if `text_config` does not say."""
_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Entries of a model with towers that are its decoder's, too, whose own say nothing then."""


def find_decoder(config_json: Mapping[str, Any]) -> Decoder | None:
    """Return what decodes in a model with towers, its first if `text_config` names none; None for all others."""
    listed = config_json.get("architectures")
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    decoders = next((WITH_TOWERS[name] for name in named if name in WITH_TOWERS), ())
    inner = config_json.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, dict) else None
    return next((one for one in decoders if one.model_type == kind), next(iter(decoders), None))


def text_part(config_json: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the decoder of a model with towers; any other as it is.

    Raises ValueError if it has none, or another one.
    """
    if (decoder := find_decoder(config_json)) is None:
        return config_json
    if not isinstance(inner := config_json.get("text_config"), dict):
        raise ValueError(f"config.json: text_config is {shown(inner)}, must be an object")
    if inner.get("model_type", decoder.model_type) != decoder.model_type:
        raise ValueError(f"config.json: text_config.model_type {shown(inner['model_type'])} is not supported")
    check_types(inner)
    outer = {name: config_json[name] for name in _OF_BOTH if name in config_json}
    return {**decoder.defaults, **inner, **outer, "architectures": [decoder.architecture]}
