"""The `config.json` and `generation_config.json` that a GGUF file's keys stand for. No torch.

`gguf_folder.py` writes them, so that everything which reads a checkpoint's configuration reads these, and what is not
computed is refused where it always is (`models/refusals.py`).

What must always hold: a key that changes what is computed is part of the result or refused by name.
"""

from __future__ import annotations

import logging
import re
import struct
from typing import Any

from .gguf_ends import find_ends
from .gguf_file import GgufFile, shown

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are divided by the root of hidden size over heads, as llama.cpp knows them."""
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys that change what is computed, by the values that do not."""
_DENSE = re.compile(r"blk\.(\d{1,6})\.ffn_gate\.weight")
_SAMPLING = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "temp": "temperature"}

_MAX_LISTED = 20
"""Of unknown keys in the log."""

_log = logging.getLogger(__name__)


class _Keys:
    """The keys of the file's architecture, by what follows it in their names."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._keys = {
            name.removeprefix(self._prefix): value for name, value in file.keys.items() if name.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._keys.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"key '{self._prefix}{name}' is {shown(value)}, must be one integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"key '{self._prefix}{name}' is {shown(value)}, must be a number")
        return _shortest(value)

    def refuse_others(self) -> None:
        """Raises ValueError for a key that was not read and changes what is computed."""
        others = sorted(self._keys.keys() - self._read)
        for name in others:
            if name in _NEUTRAL and self._keys[name] not in _NEUTRAL[name]:
                raise ValueError(f"key '{self._prefix}{name}' {shown(self._keys[name])} is not supported")
        unknown = [f"{self._prefix}{name}" for name in others if name not in _NEUTRAL and name != "vocab_size"]
        if unknown:
            _log.warning("ignoring keys: %s", ", ".join(unknown[:_MAX_LISTED]))


def architectures_of(family: str) -> list[str]:
    """Return the names that a family of `models/` has in GGUF files; Mistral's files say `llama`."""
    family = "LlamaForCausalLM" if family == "MistralForCausalLM" else family
    return [name for name, of_family in ARCHITECTURES.items() if of_family == family]


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
    keys = _Keys(file, architecture)
    num_heads = keys.whole("attention.head_count")
    hidden_size = keys.whole("embedding_length")
    if min(num_heads, hidden_size) < 1:
        raise ValueError(f"key '{architecture}.attention.head_count' or '{architecture}.embedding_length' is below 1")
    head_dim = keys.whole("attention.key_length", hidden_size // num_heads)
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"key '{architecture}.attention.value_length' differs from attention.key_length")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "dtype": "float32" if all(tensor.type == "F32" for tensor in file.tensors.values()) else "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    config |= _rope(file, keys, config, architecture)
    config |= _specifics(file, keys, config, architecture)
    keys.refuse_others()
    return config


def make_generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the `generation_config.json` of a file."""
    suggested = {ours: file.keys.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    sampling = {name: _shortest(value) for name, value in suggested.items() if isinstance(value, int | float)}
    return {**_token_ids(file), **sampling}


def _token_ids(file: GgufFile) -> dict[str, Any]:
    return {
        "bos_token_id": file.keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(find_ends(file).ids),
    }


def _specifics(file: GgufFile, keys: _Keys, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries that only this architecture has."""
    window = keys.take("attention.sliding_window") or None
    if architecture.startswith("gemma"):
        return _gemma(keys, config, architecture, window)
    if architecture == "phi3":
        return {"sliding_window": window}
    if architecture == "qwen3moe":
        experts = {ours: keys.whole(theirs) for theirs, ours in _EXPERTS.items()}
        dense = [int(found[1]) for name in file.tensors if (found := _DENSE.fullmatch(name))]
        return {**experts, "norm_topk_prob": True, "mlp_only_layers": sorted(dense)}
    if architecture == "gpt-oss":
        return {
            "num_local_experts": keys.whole("expert_count"),
            "num_experts_per_tok": keys.whole("expert_used_count"),
            "intermediate_size": keys.whole("expert_feed_forward_length"),
            "sliding_window": window,
        }
    if architecture == "llama":
        if window is not None:
            return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if window is not None:
        raise ValueError(f"key '{architecture}.attention.sliding_window' {window} is not supported")
    return {"attention_bias": True} if architecture == "qwen3" and "blk.0.attn_q.bias" in file.tensors else {}


def _gemma(keys: _Keys, config: dict[str, Any], architecture: str, window: int | None) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA[architecture]
    pattern = keys.take("attention.sliding_window_pattern")
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
        ),
        "final_logit_softcapping": keys.take("final_logit_softcapping"),
    }
    if architecture == "gemma2":
        found["attn_logit_softcapping"] = keys.take("attn_logit_softcapping")
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None and architecture == "gemma3":
        found["sliding_window_pattern"] = pattern
    return found


def _rope(file: GgufFile, keys: _Keys, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries of the rotary embedding."""
    head_dim, longest = config["head_dim"], config["max_position_embeddings"]
    width = keys.whole("rope.dimension_count", head_dim)
    if width != head_dim and architecture != "phi3":
        raise ValueError(f"key '{architecture}.rope.dimension_count' is {width}, only {head_dim} is supported")
    theta = keys.number("rope.freq_base", 1e6 if architecture == "gemma3" else 10_000.0)
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
    if width != head_dim:
        rope["partial_rotary_factor"] = width / head_dim
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
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
    return [_shortest(number) for number in struct.unpack(f"<{tensor.shape[0]}f", read)]


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32: the one that was written."""
    if isinstance(value, int):
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((number for number in shorter if _as_float32(number) == value), value)


def _as_float32(number: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return number
