"""GGUF files, written with llama.cpp's own `gguf` package from checkpoints of transformers as its converter does.

Imported by the tests of the reader. Names, keys and the order of rows are written from the format's description, not
with our own tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TYPES = {
    name: getattr(gguf.GGMLQuantizationType, name)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "MXFP4")
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn": "attn_sinks",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
}
_POST = {"post_attention_layernorm": "post_attention_norm"}
_OTHER_NORMS = {
    "gpt-oss": _POST,
    "glm4moe": _POST,
    "seed_oss": _POST,
    "olmo2": {**_POST, "post_feedforward_layernorm": "post_ffw_norm"},
    "exaone4": {**_POST, "post_feedforward_layernorm": "post_ffw_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
_ROTATED_OTHERWISE = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA3N = {
    **_GEMMA,
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_OF_COPIES = {"model.altup_projections.": "altup_proj", "model.altup_unembed_projections.": "altup_unembd_proj"}
_GEMMA4 = {
    **_GEMMA,
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GEMMA4_TOP = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_GEMMA4_WHOLE = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


_KINDS_OF_EXPERTS = {
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of each expert of gpt-oss, Granite, Gemma and Llama 4 by a name of its own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".block_sparse_moe." in name and tensor.dim() == 3:
            prefix, _, kind = name.partition("_linear.weight")[0].rpartition(".")
            names = ("gate_proj", "up_proj") if kind == "input" else ("down_proj",)
            for expert, rows in enumerate(tensor):
                for part, some in zip(names, rows.chunk(len(names)), strict=True):
                    found[f"{prefix}.experts.{expert}.{part}.weight"] = some.contiguous()
            continue
        if name.endswith("_proj") and ".mlp." not in name:
            prefix, _, kind = name.rpartition(".")
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for expert, rows in enumerate(tensor.transpose(1, 2) if ".feed_forward." in name else tensor):
                for part, some in zip(names, rows.chunk(len(names)), strict=True):
                    found[f"{prefix}.{expert}.{part}.weight"] = some.contiguous()
            continue
        prefix, is_expert, kind = name.partition(".mlp.experts.")
        if not is_expert or kind[0].isdigit():
            found[name] = tensor
            continue
        kind, is_bias, _ = kind.partition("_bias")
        for expert, one in enumerate(tensor):
            rows = one if is_bias else one.T
            parts = {"down_proj": rows} if kind == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            for part, numbers in parts.items():
                own = f"{prefix}.mlp.experts.{expert}.{part}.{'bias' if is_bias else 'weight'}"
                found[own] = numbers.contiguous()
    return found


def write_gguf(
    path: Path,
    architecture: str,
    checkpoint: Path,
    *,
    types: dict[str, str] | None = None,
    keys: dict[str, Any] | None = None,
    tokenizer: Path | None = None,
    pre: str = "gpt-2",
    tensors_each: int = 0,
    fuses_heads: bool = False,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a checkpoint; return what each tensor holds, by its name in the checkpoint.

    `types` are types of matrices by a part of their name; the others are F32. `keys` are added to those that all
    architectures have. With `tensors_each`, several files of so many tensors each are written, named as its parts;
    with `fuses_heads`, queries, keys and values are one tensor.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_each)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    centred = config.get("layer_norm_eps", config.get("norm_epsilon"))
    if centred is None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(centred)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture != "deepseek2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(float(config.get("rope_theta") or 10_000.0))
    extra_tensors = {name: value for name, value in (keys or {}).items() if isinstance(value, np.ndarray)}
    for name, value in (keys or {}).items():
        if name not in extra_tensors:
            is_general = name.startswith(("general", "split", "tokenizer"))
            _add_key(writer, name if is_general else f"{architecture}.{name}", value)
    if tokenizer is None:
        _add_plain_tokenizer(writer, config["vocab_size"])
    else:
        add_tokenizer(writer, tokenizer, pre)
    splits = "attention.key_length_mla" in (keys or {})
    tensors = apart(load_tensors(checkpoint))
    if fuses_heads:
        for name in [name for name in tensors if ".q_proj." in name]:
            three = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            tensors[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(three)
    held = _add_tensors(writer, architecture, config, tensors, types or {}, splits_latents=splits)
    for name, value in extra_tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_array(name, value)
    else:
        add[type(value)](name, value)


def _add_plain_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)] + ["t1t2"])
    writer.add_token_types([1] * (vocab_size + 1))
    writer.add_token_merges(["t1 t2"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """Add a byte-level tokenizer's vocabulary, with the types that the converter gives to added tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    vocab |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in vocab.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(max(by_id) + 1)]
    kinds = [
        5 if number not in by_id else 1 if t not in special else 3 if special[t] else 4
        for number, t in enumerate(tokens)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id)):
        if isinstance(config.get(name), str):
            add(vocab[config[name]])
    template = folder / "chat_template.jinja"
    text = template.read_text() if template.exists() else config.get("chat_template")
    if text is not None:
        writer.add_chat_template(text)


def _add_tensors(
    writer: gguf.GGUFWriter,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    types: dict[str, str],
    *,
    splits_latents: bool,
) -> dict[str, np.ndarray[Any, Any]]:
    held: dict[str, np.ndarray[Any, Any]] = {}
    stacked: dict[str, list[str]] = {}
    for name in tensors:
        if ".experts." in name:
            layer, _, rest = (
                re.sub(r"\.(block_sparse_moe|feed_forward|mlp)", "", name.removeprefix("model.layers."))
            ).partition(".experts.")
            part = _KINDS_OF_EXPERTS[rest.split(".")[1]]
            stacked.setdefault(f"blk.{layer}.ffn_{part}_exps.{rest.split('.')[2]}", []).append(name)
    for name, names in stacked.items():
        if architecture == "gemma4" and "_down_" not in name:
            if "_gate_" in name:  # and up, of which each expert's rows follow
                held |= _add_gate_up(writer, name, tensors, sorted(names, key=_number_of), types)
            continue
        ordered = sorted(names, key=_number_of)
        read = _add(writer, name, np.stack([tensors[one].float().numpy() for one in ordered]), types, ordered[0])
        held |= dict(zip(ordered, read, strict=True))
    for start, stacked_name in _OF_COPIES.items():
        names = sorted(name for name in tensors if name.startswith(start))
        if names:
            numbers = np.stack([tensors[name].float().numpy() for name in names])
            held |= dict(zip(names, _add(writer, f"{stacked_name}.weight", numbers, types, names[0]), strict=True))
    for name, tensor in tensors.items():
        if (
            ".experts." in name
            or name.startswith(tuple(_OF_COPIES))
            or (name == "lm_head.weight" and config["tie_word_embeddings"])
        ):
            continue
        numbers = tensor.float().numpy()
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            numbers = numbers + 1
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        if architecture in _ROTATED_OTHERWISE and heads is not None:
            # rotary pairs beside each other: the two halves of a head are interleaved
            numbers = numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        if name.endswith("shared_expert_gate.weight"):
            numbers = numbers[0]
        if name.endswith("kv_b_proj.weight") and splits_latents:
            held[name] = numbers
            _add_latents(writer, name, numbers, config)
            continue
        read = _add(writer, _rename(name, architecture), numbers, types, name)
        if name.endswith("shared_expert_gate.weight"):
            read = read[None]
        if architecture in _ROTATED_OTHERWISE and heads is not None:
            read = read.reshape(heads, -1, 2, *read.shape[1:]).swapaxes(1, 2).reshape(read.shape)
        held[name] = read - 1 if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else read
    return held


def _number_of(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


def _add_gate_up(
    writer: gguf.GGUFWriter, name: str, tensors: dict[str, torch.Tensor], gates: list[str], types: dict[str, str]
) -> dict[str, np.ndarray[Any, Any]]:
    """Add the matrices of gate and up of all experts as one tensor."""
    both = [(gate, gate.replace("gate_proj", "up_proj")) for gate in gates]
    numbers = np.stack([torch.cat([tensors[one] for one in pair]).float().numpy() for pair in both])
    read = _add(writer, name.replace("_gate_", "_gate_up_"), numbers, types, gates[0])
    halves = [half for rows in read for half in np.split(rows, 2)]
    return dict(zip([one for pair in both for one in pair], halves, strict=True))


def _add_latents(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray[Any, Any], config: dict[str, Any]) -> None:
    """Add what makes keys and values of latents as two tensors, that of keys transposed."""
    layer = name.split(".")[2]
    heads = numbers.reshape(config["num_attention_heads"], -1, numbers.shape[1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    writer.add_tensor(f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2)))
    writer.add_tensor(f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(values))


def _add(
    writer: gguf.GGUFWriter, name: str, numbers: np.ndarray[Any, Any], types: dict[str, str], own_name: str
) -> np.ndarray[Any, Any]:
    kind = next((kind for part, kind in types.items() if part in own_name), "F32") if numbers.ndim > 1 else "F32"
    numbers = np.ascontiguousarray(numbers)
    stored = gguf.quantize(numbers, TYPES[kind])
    writer.add_tensor(name, stored, raw_dtype=TYPES[kind])
    return gguf.dequantize(stored, TYPES[kind]).reshape(numbers.shape)


def _rename(name: str, architecture: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "lm_head.bias": "output.bias",
    }
    if name in top:
        return top[name]
    if name in _GEMMA4_TOP:
        return _GEMMA4_TOP[name]
    if name == "model.norm.bias":
        return "output_norm.bias"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    if rest in _GEMMA4_WHOLE:
        return f"blk.{layer}.{_GEMMA4_WHOLE[rest]}"
    if rest == "mlp.gate.e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias"
    gemma = {"gemma3n": _GEMMA3N, "gemma4": _GEMMA4}.get(architecture, _GEMMA)
    parts = _PARTS | (gemma if architecture.startswith("gemma") else _OTHER_NORMS.get(architecture, {}))
    return f"blk.{layer}.{parts[part]}.{kind.replace('sinks', 'weight')}"
