"""Which models of transformers are not served, as far as their configuration and class show it.

`transformers_loading.py` asks before it reads any weights. What only a pass shows is found by `start_checks.py`.

What must always hold: a model that keeps more than keys and values of each token, or computes a token by the tokens
that it happens to be computed with, is refused by name.
"""

from __future__ import annotations

from typing import Any

import attrs

_LAYERS = frozenset({"full_attention", "sliding_attention"})


@attrs.frozen
class Seeing:
    """How an architecture reads images: all of one size, with positions as in text."""

    towers: frozenset[str]
    """The types of `vision_config` that are served."""
    whole_images: bool = False
    """The tokens of an image attend to one another in both directions, in layers with a window, too."""


SEEING = {
    "LlavaForConditionalGeneration": Seeing(frozenset({"clip_vision_model", "siglip_vision_model"})),
    "Gemma3ForConditionalGeneration": Seeing(frozenset({"siglip_vision_model"}), whole_images=True),
}
"""Architectures whose images are read."""
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")


def check_config(config: Any, named: str, max_model_len: int) -> None:
    """Raises ValueError for a model that is not served. `named`: its architecture."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{named} has an encoder: the transformers executor serves decoders only")
    if (seeing := SEEING.get(named)) is not None:
        tower = config.vision_config.model_type
        if tower not in seeing.towers:
            raise ValueError(
                f"{named} with {tower} reads images of many sizes, which the transformers executor does not"
            )
        if config.image_token_id >= config.get_text_config().vocab_size:
            raise ValueError(f"image_token_index {config.image_token_id} is not below the decoder's vocab_size")
    elif any(getattr(config, entry, None) is not None for entry in _OTHER_INPUTS):
        raise ValueError(f"{named} reads more than text, which the transformers executor does not serve")
    decoder = config.get_text_config()
    other = sorted(set(map(str, getattr(decoder, "layer_types", None) or ())) - _LAYERS)
    if other:
        raise ValueError(
            f"{named} has layers of the types {', '.join(other)}: the transformers executor serves full_attention and "
            f"sliding_attention, which need one block table and no state"
        )
    _check_positions(decoder, named, max_model_len)


def check_class(model: Any, named: str) -> None:
    """Raises ValueError for a class whose attention is its own, or that keeps a state. No weights are read."""
    if model.__class__.__name__ != named:
        raise ValueError(f"transformers has no causal language model {named}: it would load {model.__class__.__name__}")
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        raise ValueError(f"{named} keeps a state besides a KV cache: the transformers executor needs blocks for all")
    if not model._can_set_attn_implementation():  # noqa: SLF001 -- says what no public name does
        raise ValueError(f"{named} has attention code of its own in transformers, which cannot be given other blocks")


def _check_positions(decoder: Any, named: str, max_model_len: int) -> None:
    """Raises ValueError for positions that the model does not have, or whose rotation depends on other tokens."""
    rotations = getattr(decoder, "rope_parameters", None) or {}
    kinds = [one for one in rotations.values() if isinstance(one, dict)] or [rotations]
    for rope in kinds:
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind == "dynamic":
            raise ValueError(
                f"{named} with rope_type 'dynamic' changes the rotation of earlier tokens, which invalidates cached "
                f"prefixes"
            )
        if kind == "longrope" and original is not None and max_model_len > original:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds original_max_position_embeddings {original}: beyond it "
                f"rope_type 'longrope' changes the rotation of earlier tokens, which invalidates cached prefixes; "
                f"choose a max_model_len up to it"
            )
    longest = getattr(decoder, "max_position_embeddings", None)
    yarn = [one for one in kinds if one.get("rope_type") == "yarn"]
    if isinstance(longest, int) and not yarn and max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {longest}")
