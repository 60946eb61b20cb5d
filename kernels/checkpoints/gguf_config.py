"""The `config.json` and `generation_config.json` that a GGUF file's keys stand for. No torch.

`gguf_folder.py` writes them, so that everything which reads a checkpoint's configuration reads these, and what is not
computed is refused where it always is (`models/refusals.py`).

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

import struct
from typing import Any

from .gguf_ends import find_ends
from .gguf_file import GgufFile, shown
from .gguf_gemma4 import read_gemma4
from .gguf_keys import Keys, shortest
from .gguf_specifics import ARCHITECTURES, LAYER_NORM_EPS, PARTLY_ROTATED, read_specifics

_SAMPLING = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "temp": "temperature"}


def make_config(file: GgufFile) -> dict[str, Any]:
    """Return the `config.json` of a file. Raises ValueError naming a key that is missing, wrong or not supported."""
    architecture = file.keys.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"key 'general.architecture' is {shown(architecture)}; supported are {known}")
    if file.keys.get("general.type", "model") != "model":
        raise ValueError(f"key 'general.type' is {shown(file.keys['general.type'])}, only a model can be served")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it lacks tensor token_embd.weight")
    keys = Keys(file, architecture)
    num_heads = keys.whole("attention.head_count")
    hidden_size = keys.whole("embedding_length")
    if min(num_heads, hidden_size) < 1:
        raise ValueError(f"key '{architecture}.attention.head_count' or '{architecture}.embedding_length' is below 1")
    head_dim = _head_dim(keys, architecture, hidden_size // num_heads)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "dtype": "float32" if all(tensor.type == "F32" for tensor in file.tensors.values()) else "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _first(keys, architecture, "feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _first(keys, architecture, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        **_epsilon(keys, architecture),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    if architecture == "gemma4":
        config |= read_gemma4(file, keys, config, _factors(file, "rope_freqs.weight"))
    else:
        config |= _rope(file, keys, config, architecture)
        config |= read_specifics(file, keys, config, architecture)
    return config | keys.others()


def make_generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the `generation_config.json` of a file."""
    suggested = {ours: file.keys.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    sampling = {name: shortest(value) for name, value in suggested.items() if isinstance(value, int | float)}
    return {**_token_ids(file), **sampling}


def _token_ids(file: GgufFile) -> dict[str, Any]:
    return {
        "bos_token_id": file.keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(find_ends(file).ids),
    }


def _first(keys: Keys, architecture: str, name: str, default: int | None = None) -> int:
    """Return a number, or the first layer's, where they may differ."""
    value = keys.take(name)
    is_list = architecture in ("gemma3n", "gemma4") and isinstance(value, list) and value and type(value[0]) is int
    return int(value[0]) if is_list else keys.whole(name, default)


def _head_dim(keys: Keys, architecture: str, usual: int) -> int:
    """Return the elements of a head, or of latent attention those of a key that are rotated."""
    if architecture == "deepseek2":
        return keys.whole("rope.dimension_count")
    suffix = "_swa" if architecture == "gemma4" else ""  # of layers with a window
    head_dim = keys.whole(f"attention.key_length{suffix}", usual)
    if keys.whole(f"attention.value_length{suffix}", head_dim) != head_dim:
        raise ValueError(
            f"key '{architecture}.attention.value_length{suffix}' differs from attention.key_length{suffix}"
        )
    return head_dim


def _epsilon(keys: Keys, architecture: str) -> dict[str, Any]:
    if architecture in LAYER_NORM_EPS:
        return {LAYER_NORM_EPS[architecture]: keys.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _rope(file: GgufFile, keys: Keys, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries of the rotary embedding."""
    head_dim, longest = config["head_dim"], config["max_position_embeddings"]
    width = keys.whole("rope.dimension_count", head_dim)
    if width != head_dim and architecture not in PARTLY_ROTATED:
        raise ValueError(f"key '{architecture}.rope.dimension_count' is {width}, only {head_dim} is supported")
    theta = keys.number("rope.freq_base", 1e6 if architecture in ("gemma3", "gemma3n") else 10_000.0)
    original = keys.whole("rope.scaling.original_context_length", longest)
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 1.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    short, long = _factors(file, "rope_factors_short.weight"), _factors(file, "rope_factors_long.weight")
    frequencies = _factors(file, "rope_freqs.weight")
    if short is not None:
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long or short,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor,
        }
    elif frequencies is not None:
        # Llama 3's scaling, computed: the factors that each frequency is divided by
        rope |= {
            "rope_type": "longrope",
            "short_factor": frequencies,
            "long_factor": frequencies,
            "original_max_position_embeddings": longest,
            "attention_factor": 1.0,
        }
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {
            name: keys.number(f"rope.scaling.yarn_{name}")
            for name in ("beta_fast", "beta_slow")
            if keys.take(f"rope.scaling.yarn_{name}") is not None
        }
        if architecture == "gpt-oss":  # no key says so
            rope["truncate"] = False
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise ValueError(f"key '{architecture}.rope.scaling.type' is {shown(kind)}, which is not supported")
    if short is None and attention_factor != 1.0:
        raise ValueError(f"key '{architecture}.rope.scaling.attn_factor' {attention_factor} is not supported")
    if architecture in PARTLY_ROTATED:
        rope["partial_rotary_factor"] = width / head_dim
    if architecture in ("gemma3", "gemma3n"):
        local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    for name, same in (("rope.freq_base_swa", theta), ("rope.dimension_count_swa", width)):
        if keys.number(name, same) != same:
            raise ValueError(f"key '{architecture}.{name}' differs from {name.removesuffix('_swa')}")
    return {"rope_parameters": rope}


def _factors(file: GgufFile, name: str) -> list[float] | None:
    """Return the numbers of a small tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 65_536:
        raise ValueError(f"tensor {name} must be a row of F32")
    with tensor.path.open("rb") as opened:
        opened.seek(tensor.start)
        read = opened.read(tensor.end - tensor.start)
    return [shortest(number) for number in struct.unpack(f"<{tensor.shape[0]}f", read)]
