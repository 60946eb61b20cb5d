"""GGUF files: every family's tensors and configuration survive, to the bit, what llama.cpp's converter does to them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch

from quipu.kernels.checkpoints.gguf_file import BLOCKS
from quipu.kernels.checkpoints.gguf_folder import make_gguf_folder
from quipu.kernels.checkpoints.gguf_tensors import open_gguf
from quipu.kernels.checkpoints.gguf_types import DECODERS
from quipu.kernels.checkpoints.quantized import QuantizedLayout
from quipu.kernels.models.config import read_config
from quipu.kernels.models.families import find_family
from quipu.kernels.models.rope import make_rope_table
from quipu.kernels.ops import SwigluClamp
from tests.kernels.checkpoints.gguf_files import apart, load_tensors, write_gguf
from tests.kernels.checkpoints.gguf_keys import KEYS, LLAMA3_FACTORS, convert, opened, parsed
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.tiny import TINY


@pytest.mark.parametrize("name", KEYS)
def test_each_family(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    """Read the same configuration and the same tensors as from the checkpoint that was converted."""
    checkpoint = checkpoints[name]
    folder, _ = convert(tmp_path / "m.gguf", checkpoint, name)
    found, expected = parsed(folder), parsed(checkpoint)
    if name == "qwen2-yarn":  # its blending has keys that no converter writes
        found, expected = (attrs.evolve(one, rope=expected.rope, local_rope=expected.rope) for one in (found, expected))
    if name in ("gemma2", "gemma3"):  # llama.cpp knows the scale by the number of layers
        expected = attrs.evolve(expected, attention_scale=expected.head_dim**-0.5)
    if name == "phi3":
        assert found.rope.scaling.attention_factor == pytest.approx(expected.rope.scaling.attention_factor, rel=1e-6)
        rope = attrs.evolve(found.rope, scaling=expected.rope.scaling)
        found = attrs.evolve(found, rope=rope, local_rope=rope)
    if name == "olmoe":  # no file says that weights of experts are normalised
        expected = attrs.evolve(expected, moe=attrs.evolve(expected.moe, normalise=False))
    if name in ("qwen2-moe", "smollm3"):  # nor which layers have windows
        expected = attrs.evolve(expected, windows=(None, None))
    if name == "smollm3":  # nor which are not rotated: every fourth
        expected = attrs.evolve(expected, unrotated=frozenset())
    if name == "gpt-oss":  # whose limit is not the published one
        expected = attrs.evolve(expected, moe=attrs.evolve(expected.moe, clamp=SwigluClamp(1.702, 7.0)))
    if name == "phimoe":  # nor the range of SparseMixer
        choice = attrs.evolve(expected.moe.choice, mixer_range=0.02)
        expected = attrs.evolve(expected, moe=attrs.evolve(expected.moe, choice=choice))
    if name == "llama4":  # what is small in the checkpoint, llama.cpp has constants for
        expected = attrs.evolve(
            expected,
            windows=(8192,) * 3,
            unrotated=frozenset(),
            rope=attrs.evolve(expected.rope, scaling=None),
            local_rope=attrs.evolve(expected.rope, scaling=None),
            temperature=None,
        )
    assert found == expected
    source = opened(folder)
    for tensor_name, tensor in apart(load_tensors(checkpoint)).items():
        if tensor_name == "lm_head.weight" and expected.tie_word_embeddings:
            continue
        read = source.tensor(tensor_name, tuple(tensor.shape))
        if name in ("gemma2", "gemma3") and tensor_name.endswith("norm.weight"):
            assert torch.allclose(read, tensor, rtol=0, atol=1e-7), tensor_name
        else:
            assert torch.equal(read, tensor), tensor_name
    source.check_all_used()


def test_scaling_of_llama3(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Divide each frequency by its factor in `rope_freqs`, at every length."""
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", checkpoints["llama-rope3"], keys={"rope_freqs.weight": LLAMA3_FACTORS})
    rope = parsed(make_gguf_folder(path)).rope
    angles = torch.arange(8) / 8
    expected = 3 * rope.theta**-angles / torch.from_numpy(LLAMA3_FACTORS)
    assert torch.allclose(make_rope_table(rope, 5).cos_PR[3], expected.cos(), atol=1e-6)


def test_mistral_small(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Read Mistral from a file of Ministral 3's architecture, if its queries do not grow, or name the contradiction."""
    path, (_, of_mistral), (_, of_ministral) = tmp_path / "m.gguf", KEYS["mistral"], KEYS["ministral3"]
    write_gguf(path, "mistral3", checkpoints["mistral"], keys=of_mistral)
    assert parsed(make_gguf_folder(path)) == parsed(checkpoints["mistral"])
    write_gguf(path, "mistral3", checkpoints["mistral"], keys=of_mistral | {"attention.temperature_scale": 0.1})
    with pytest.raises(ValueError, match=r"rope\.scaling\.type' is linear, must be yarn with temperatures"):
        make_gguf_folder(path)
    write_gguf(path, "mistral3", checkpoints["ministral3"], keys=of_ministral | {"attention.temperature_length": 9})
    with pytest.raises(ValueError, match=r"temperature_length' is not 32, the original context length"):
        make_gguf_folder(path)


def test_served_like_the_checkpoint(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Compute the same logits from the file as from the checkpoint that it was made from."""
    row = make_batch({"token_ids": prompt(20, seed=1), "position": 0, "blocks": scattered_blocks(2, seed=1)})
    folder, _ = convert(tmp_path / "m.gguf", checkpoints["llama"], "llama")
    expected = make_backend(checkpoints["llama"]).logits(row, [19])
    assert torch.equal(make_backend(folder).logits(row, [19]), expected)


@pytest.mark.parametrize("kind", DECODERS)
def test_block_types(kind: str) -> None:
    """Equal `gguf`'s dequantization to the bit for any bytes, with codes within the layout's range."""
    rng = np.random.default_rng(0)
    size = BLOCKS[kind][1]
    data = rng.integers(0, 256, (7, 3 * size), dtype=np.uint8)
    blocks = data.reshape(7, 3, size)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "MXFP4": ()}.get(kind, (0, 2)):
        blocks[..., at : at + 2] = rng.standard_normal((7, 3, 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(0, 255, (7, 3))  # 255 is no number
    rows = DECODERS[kind].decode(torch.from_numpy(blocks))
    expected = gguf.dequantize(data, getattr(gguf.GGMLQuantizationType, kind))
    assert np.array_equal(rows.dequantized().numpy(), expected)
    layout = DECODERS[kind].layout
    assert rows.group_size == layout.group_size
    assert (rows.offsets_OG is not None) == layout.has_offsets
    top = 2 ** (layout.bits - 1)
    if layout.is_e2m1:
        assert (int(rows.codes_OI.min()), int(rows.codes_OI.max())) == (0, 15)
        return
    assert -top <= int(rows.codes_OI.min()) <= int(rows.codes_OI.max()) < top


def test_mxfp4_experts(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Read each expert's matrices in MXFP4 as such, and what else of gpt-oss is in other types."""
    types = {"gate_proj.weight": "MXFP4", "up_proj.weight": "MXFP4", "down_proj.weight": "MXFP4", "q_proj": "Q8_0"}
    folder, held = convert(tmp_path / "m.gguf", checkpoints["gpt-oss"], "gpt-oss", types=types)
    source = opened(folder, "float32")
    parts = [(f"model.layers.0.mlp.experts.2.{part}_proj.weight", (64, 64)) for part in ("gate", "up")]
    assert source.quantized(parts) == QuantizedLayout(4, 32, has_offsets=False, is_e2m1=True)
    for tensor_name, numbers in held.items():
        assert torch.equal(source.tensor(tensor_name, numbers.shape), torch.from_numpy(numbers)), tensor_name
    source.check_all_used()
    assert source.format == "mxfp4"
    wrong, _ = convert(tmp_path / "n.gguf", checkpoints["gpt-oss"], "gpt-oss", types={"down_proj.bias": "Q8_0"})
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_down_exps\.bias is Q8_0, must be plain numbers"):
        opened(wrong)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_quantized_tensors(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    """Read types side by side: fused in the narrowest common layout, rows of heads in order, each expert apart."""
    types = {
        "q_proj": "Q4_0",
        "k_proj": "Q8_0",
        "v_proj": "Q4_1",
        "o_proj": "F16",
        "gate_proj": "Q8_0",
        "up_proj": "Q5_0",
        "embed_tokens": "BF16",
    }
    folder, held = convert(tmp_path / "m.gguf", checkpoints[name], name, types=types)
    source = opened(folder, "float32")
    prefix = "model.layers.1.self_attn."
    qkv = [(f"{prefix}{part}_proj.weight", held[f"{prefix}{part}_proj.weight"].shape) for part in "qkv"]
    expected = torch.cat([torch.from_numpy(held[part]) for part, _ in qkv])
    assert source.quantized(qkv) == QuantizedLayout(8, 32, has_offsets=True)
    pieces = [rows.dequantized() for rows in source.quantized_pieces(qkv, multiple=32)]
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(source.fused(qkv), expected)
    for tensor_name, numbers in held.items():
        assert torch.equal(source.tensor(tensor_name, numbers.shape), torch.from_numpy(numbers)), tensor_name
    source.check_all_used()
    if name == "llama":
        assert source.format == "q8_0"


def test_tables_are_quantized_on_request(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Quantize what a file has left plain, if that is asked for."""
    folder, held = convert(tmp_path / "m.gguf", checkpoints["llama"], "llama", types={"proj": "Q4_0"})
    source = opened(folder, "float32", quantization="int8")
    embed = ("model.embed_tokens.weight", held["model.embed_tokens.weight"].shape)
    assert source.quantized([embed]) == QuantizedLayout(8, 64, has_offsets=False)
    o_proj = "model.layers.0.self_attn.o_proj.weight"
    assert source.quantized([(o_proj, held[o_proj].shape)]) == QuantizedLayout(4, 32, has_offsets=False)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_fused_heads(tmp_path: Path, checkpoints: dict[str, Path], kind: str) -> None:
    """Read queries, keys and values of ChatGLM that are one tensor, and its biases, as those of three."""
    types = {"proj": kind}
    whole, _ = convert(tmp_path / "whole.gguf", checkpoints["glm"], "glm", types=types, fuses_heads=True)
    apart_, held = convert(tmp_path / "apart.gguf", checkpoints["glm"], "glm", types=types)
    assert parsed(whole) == parsed(apart_) and parsed(whole).qkv_bias
    source = opened(whole, "float32")
    for tensor_name, numbers in held.items():
        assert torch.equal(source.tensor(tensor_name, numbers.shape), torch.from_numpy(numbers)), tensor_name
    source.check_all_used()
    convert(tmp_path / "odd.gguf", checkpoints["glm"], "glm", fuses_heads=True)
    path = tmp_path / "odd.gguf"
    path.write_bytes(path.read_bytes().replace(b"chatglm.attention.head_count_kv", b"chatglm.attention.head_count_no"))
    with pytest.raises(ValueError, match=r"attn_qkv\..* has shape .*, must be the rows of \[4, 4, 4\] heads"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_sparsity_scale": [1.0]}, "activation_sparsity_scale' is .*, must be 6 numbers"),
        ({"activation_sparsity_scale": [math.inf] * 6}, "activation_sparsity_scale' is .*, must be 6 numbers"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern' is .*, must list all layers"),
        ({"feed_forward_length": [96, 96]}, "feed_forward_length' is .*, must be 6 integers"),
        ({"altup.num_inputs": ...}, "altup.num_inputs' is None, must be one integer"),
    ],
)
def test_keys_of_gemma3n(tmp_path: Path, checkpoints: dict[str, Path], changes: dict[str, Any], named: str) -> None:
    """Refuse lists that are not of all layers, and a file that does not say how many copies there are."""
    keys = {name: value for name, value in {**KEYS["gemma3n"][1], **changes}.items() if value is not ...}
    write_gguf(tmp_path / "m.gguf", "gemma3n", checkpoints["gemma3n"], keys=keys)
    with pytest.raises(ValueError, match=f"m.gguf cannot be read: key 'gemma3n.*{named}"):
        make_gguf_folder(tmp_path / "m.gguf")


def test_defaults_of_gemma3n(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Compute what llama.cpp does where a file says nothing: every fifth layer has no window, and logits are capped."""
    keys = dict(KEYS["gemma3n"][1])
    del keys["attention.sliding_window_pattern"], keys["final_logit_softcapping"], keys["rope.freq_base"]
    write_gguf(tmp_path / "m.gguf", "gemma3n", checkpoints["gemma3n"], keys=keys | {"attention.shared_kv_layers": 1})
    found = parsed(make_gguf_folder(tmp_path / "m.gguf"))
    assert found.windows == (30, 30, 30, 30, None, 30)
    assert (found.logits_soft_cap, found.local_rope.theta) == (30.0, 10_000.0)


def test_dtype(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Compute in bfloat16 by default, unless the file has nothing but float32."""
    assert read_config(convert(tmp_path / "a.gguf", checkpoints["llama"], "llama")[0])["dtype"] == "float32"
    folder, _ = convert(tmp_path / "b.gguf", checkpoints["llama"], "llama", types={"proj": "F16"})
    assert read_config(folder)["dtype"] == "bfloat16"


def test_ends_of_turns(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Stop at the tokens that a key names, and at special tokens that are known to end a turn."""
    keys = {"tokenizer.ggml.eot_token_id": 7, "general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    write_gguf(tmp_path / "m.gguf", "llama", checkpoints["llama"], keys=keys, tokenizer=TINY)
    folder = make_gguf_folder(tmp_path / "m.gguf")
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert set(generation["eos_token_id"]) == {7, special["<|im_end|>"], special["<|endoftext|>"]}
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)
    assert read_config(folder)["eos_token_id"] == generation["eos_token_id"]


def test_keys_are_read_without_torch() -> None:
    """The web process reads a file's keys, and must not load torch for it."""
    code = "import sys, quipu.kernels.checkpoints.gguf_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"general.type": "adapter"}, "general.type"),
        ({"split.count": 3}, "split.count"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"rope.scaling.type": "dynamic"}, "llama.rope.scaling.type"),
        ({"expert_count": 8}, "llama.expert_count"),
        ({"expert_shared_feed_forward_length": 8}, "llama.expert_shared_feed_forward_length"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv"),
        ({"attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping"),
        ({"pooling_type": 1}, "llama.pooling_type"),
        ({"rope.freq_base_swa": 1e6}, "llama.rope.freq_base_swa"),
        ({"rope.dimension_count_swa": 8}, "llama.rope.dimension_count_swa"),
        ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token"),
    ],
)
def test_unsupported_keys(tmp_path: Path, checkpoints: dict[str, Path], keys: dict[str, Any], named: str) -> None:
    """Refuse keys that change what is computed, by their names."""
    write_gguf(tmp_path / "m.gguf", "llama", checkpoints["llama"], keys=keys)
    with pytest.raises(ValueError, match=f"m.gguf cannot be read: key '{named}'"):
        make_gguf_folder(tmp_path / "m.gguf")


@pytest.mark.parametrize(("architecture", "pre"), [("falcon", "gpt-2"), ("llama", "viking")])
def test_unsupported_models(tmp_path: Path, checkpoints: dict[str, Path], architecture: str, pre: str) -> None:
    """Refuse other architectures, and other ways to split text, by name."""
    more: dict[str, Any] = {} if pre == "gpt-2" else {"tokenizer": Path("tests/checkpoints/tiny"), "pre": pre}
    write_gguf(tmp_path / "m.gguf", architecture, checkpoints["llama"], **more)
    with pytest.raises(ValueError, match=f"{architecture if pre == 'gpt-2' else pre}'; supported are"):
        make_gguf_folder(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", KEYS)
def test_unknown_keys(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    """Keys of the architecture that are not understood are refused by name, as entries of `config.json` are."""
    architecture, keys = KEYS[name]
    write_gguf(tmp_path / "m.gguf", architecture, checkpoints[name], keys={**keys, "new.gate": [1.0, 2.0], "odd": True})
    config = read_config(make_gguf_folder(tmp_path / "m.gguf"))
    unknown = [f"{architecture}.new.gate", f"{architecture}.odd"]
    with pytest.raises(ValueError, match=f"not understood: {', '.join(unknown)}"):
        find_family(config).parse(config)
    assert find_family(config).parse(config, ignored=unknown) == parsed(
        convert(tmp_path / "a", checkpoints[name], name)[0]
    )


def test_unused_keys(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Keys that change nothing are no entries: of other norms and other scalings, and values that ask for nothing."""
    more = {
        "attention.layer_norm_epsilon": 1e-3,
        "expert_feed_forward_length": 0,
        "expert_group_count": 1,
        "pooling_type": 3,
        "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 10_000.0,
        "rope.scaling.finetuned": True,
        "rope.scaling.yarn_beta_fast": 32.0,
        "vocab_size": 320,
    }
    write_gguf(tmp_path / "m.gguf", "llama", checkpoints["llama"], keys=more)
    expected, _ = convert(tmp_path / "a.gguf", checkpoints["llama"], "llama")
    assert read_config(make_gguf_folder(tmp_path / "m.gguf")) == read_config(expected)
