"""The calculator of `docs/operate/sizing.md`, run in a browser: its numbers are those of the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quipu.kernels.backend import BackendConfig, KVMemory
from quipu.kernels.cpu.build import load_kernels
from quipu.kernels.cpu.packing import PackedWeights
from quipu.kernels.kv_cache import choose_kv_dtype
from quipu.kernels.kv_cache_size import DeviceMemory, plan_memory, show
from quipu.kernels.machine import Memory
from quipu.kernels.models.families import FAMILIES, find_family
from quipu.kernels.opened_model import open_model
from quipu.web.cli.setting_flags import parse_size
from tests.browsers import DESKTOP, PHONE, Browser
from tests.kernel_markers import needs_kernels

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "scripts" / "site" / "static"
SCRIPT, PAGE = ((STATIC / name).read_text() for name in ("sizing.js", "sizing_page.js"))
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 160,
    "max_position_embeddings": 2048,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {},  # each head its own keys and values, untied
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 128, "head_dim": 64},
    "Phi3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 100},
    "Qwen2": {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    "Qwen3": {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    "Qwen3Moe": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "mlp_only_layers": [1],
    },
    "Gemma2": {"num_key_value_heads": 4, "sliding_window": 33},
    "Gemma3": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 20},
    "Gemma4": {
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 192,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    },
    "Exaone4": {"num_key_value_heads": 2, "sliding_window": None},
    "Glm4": {"num_key_value_heads": 2},
    "Glm": {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": False},
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"attention_bias": True, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "Ministral": {"num_key_value_heads": 4, "sliding_window": 128},
    "Ministral3": {
        "num_key_value_heads": 4,
        "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    "Olmo2": {"num_key_value_heads": 4},
    "Olmo3": {"sliding_window": 50},
    "Olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
    },
    "SeedOss": {"num_key_value_heads": 4, "head_dim": 16, "attention_out_bias": True},
    "SmolLM3": {"num_key_value_heads": 2},
    "DeepseekV2": {
        "q_lora_rank": None,
        "kv_lora_rank": 96,
        "qk_rope_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 1,
    },
    "Cohere2": {"num_key_value_heads": 2, "sliding_window": 50},
    "StableLm": {"num_key_value_heads": 2, "use_qkv_bias": True, "use_parallel_residual": True},
    "Starcoder2": {"num_key_value_heads": 2},
    "Glm4Moe": {
        "num_key_value_heads": 2,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "n_shared_experts": 0,
    },
    "GraniteMoe": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeHybrid": {
        "num_key_value_heads": 2,
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
    },
    "Llama4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "intermediate_size_mlp": 160,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "Phimoe": {"num_key_value_heads": 2, "attention_bias": True, "lm_head_bias": True, "num_local_experts": 4},
    "DeepseekV3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 40,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "Gemma3n": {
        "num_hidden_layers": 4,
        "intermediate_size": [192, 256, 192, 224],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 128,
        "altup_num_inputs": 3,
        "laurel_rank": 40,
        "attention_bias": True,
    },
}
"""For each family a config in which something differs from the others, with absent entries where they have defaults."""
FORMATS = [
    ("bfloat16", "", "auto", 16),
    ("bfloat16", "int8", "int8", 32),
    ("float32", "int4", "float32", 16),
    ("bfloat16", "int4-g128", "auto", 24),
]
"""--dtype, --quantization, --kv-cache-dtype and --block-size."""
ADD_SCRIPT = "document.body.append(Object.assign(document.createElement('script'), {textContent: arguments[0]}))"
CHOOSE = (
    "const one = document.querySelector(arguments[0]); one.value = arguments[1];"
    "one.dispatchEvent(new Event('input', {bubbles: true}))"
)


def ask(browser: Browser, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers for each config and what is chosen."""
    default = {
        "model": "x",
        "dtype": "bfloat16",
        "quantization": "",
        "kvDtype": "auto",
        "blockSize": 16,
        "context": 1000,
        "streams": 3,
        "memory": 8 << 30,
    }
    found: list[dict[str, Any]] = browser.run(
        f"{SCRIPT}; return arguments[0].map(quipuSizing.plan)", [default | one for one in asked]
    )
    return found


@needs_kernels
@pytest.mark.parametrize("family", CONFIGS)
def test_numbers(browser: Browser, tmp_path: Path, family: str) -> None:
    """Weights, blocks, and the cache that the flag brings are what the server makes of the same config."""
    data = {"architectures": [f"{family}ForCausalLM"], **SIZES, **CONFIGS[family]}
    (tmp_path / "config.json").write_text(json.dumps(data))
    asked: list[dict[str, Any]] = [
        {"data": data, "dtype": dtype, "quantization": quantization, "kvDtype": kv_dtype, "blockSize": block_size}
        for dtype, quantization, kv_dtype, block_size in FORMATS
    ]
    library = load_kernels().library
    for choice, found in zip(asked, ask(browser, asked), strict=True):
        block_size = int(choice["blockSize"])
        config = BackendConfig(
            model_path=tmp_path,
            dtype=choice["dtype"],
            load_format="dummy",
            block_size=block_size,
            num_blocks=None,
            kv_memory=KVMemory(num_bytes=parse_size(found["command"].split("--kv-cache-memory ")[1].split()[0])),
            max_num_seqs=3,
            max_model_len=1000,
            max_num_batched_tokens=64,
            quantization=choice["quantization"] or None,
        )
        with torch.inference_mode():
            opened = open_model(config)
            weights = PackedWeights(opened.source, library)
            opened.build(weights)
        block = opened.block_shape(block_size, choose_kv_dtype(choice["kvDtype"], opened.dtype))
        assert (found["weights"], found["block"]) == (weights.num_bytes, block.num_bytes)
        device = DeviceMemory(
            block_bytes=block.num_bytes,
            weights_bytes=weights.num_bytes,
            held=weights.num_bytes,
            profile=lambda: 0,
            memory=lambda: Memory(8 << 30, 8 << 30),
        )
        each = -(-1000 // block_size)
        assert found["blocks"] == 1 + 3 * each <= plan_memory(config, device).num_blocks
        room = (8 << 30) - (1 << 30) - weights.num_bytes
        assert found["fit"] == (room // block.num_bytes - 1) // each


def test_menu(browser: Browser) -> None:
    """Every family that is served is known, and sizes of the menu's models are read as the server reads them."""
    models = browser.run(f"{SCRIPT}; return quipuSizing.MODELS")
    shapes = browser.run(f"{SCRIPT}; return Object.entries(quipuSizing.MODELS).map("
                         "([name, data]) => [name, quipuSizing.shapeOf(data)])")  # fmt: skip
    assert set(browser.run(f"{SCRIPT}; return Object.keys(quipuSizing.FAMILIES)")) == set(FAMILIES)
    for name, shape in shapes:
        data = models[name]
        config = find_family(data).parse(data)
        assert (shape["layers"], shape["kvHeads"], shape["headDim"]) == (
            *(config.num_layers, config.num_kv_heads, config.head_dim),
        )
        assert (shape["tied"], shape["vocab"], shape["hidden"], shape["ffn"]) == (
            *(config.tie_word_embeddings, config.vocab_size, config.hidden_size, config.intermediate_size),
        )


def test_table(browser: Browser) -> None:
    """The page's table, for those who read it where no scripts run, has the calculator's numbers of every model."""
    text = (ROOT / "docs" / "operate" / "sizing.md").read_text()
    section = text.partition("## What some models take\n")[2].partition("\n## ")[0]
    said = {name: cells.split(" | ") for name, cells in re.findall(r"^\| (.*?) \| (.*iB) \|$", section, re.MULTILINE)}
    models = browser.run(f"{SCRIPT}; return quipuSizing.MODELS")
    assert said.keys() == models.keys()
    choices: tuple[dict[str, str], ...] = ({}, {"quantization": "int8"}, {"quantization": "int4"}, {"kvDtype": "int8"})
    asked = [{"data": data, "context": 8192, "streams": 8, **one} for data in models.values() for one in choices]
    found = iter(ask(browser, asked))
    for name, (plain, int8, int4, int8_kv) in zip(models, zip(found, found, found, found, strict=True), strict=True):
        numbers = [plain["weights"], int8["weights"], int4["weights"], plain["tokenBytes"], int8_kv["tokenBytes"]]
        assert said[name] == [show(int(number)) for number in (*numbers, plain["cache"])]


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["390", "1280"])
def test_page(browser: Browser, size: tuple[int, int]) -> None:
    """The form shows numbers at once, follows what is chosen, reads a config.json, and says what is wrong with one."""
    browser.look(size=size, scheme="light")
    browser.driver.get(
        "data:text/html,<meta name=viewport content=width=device-width><div id=sizing>Formulas only.</div>"
    )
    browser.run(ADD_SCRIPT, SCRIPT + PAGE)
    browser.wait_text("#sizing-weights", "1.12GiB")
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    browser.run(CHOOSE, "[name=quantization]", "int4")
    browser.wait_text("#sizing-command", "--quantization int4")
    browser.run(CHOOSE, "[name=model]", "from a config.json")
    browser.wait_text(".sizing-error", "paste the model's config.json")
    browser.run(CHOOSE, "[name=config]", json.dumps({"architectures": ["MixtralForCausalLM"]}))
    browser.wait_text(".sizing-error", "architectures must have one of LlamaForCausalLM")
    assert browser.run("return document.querySelector('#sizing-weights').textContent") == ""
    data = {"architectures": ["Qwen3ForCausalLM"], **SIZES, **CONFIGS["Qwen3"], "max_position_embeddings": 8192}
    browser.run(CHOOSE, "[name=config]", json.dumps(data))
    browser.wait_text("#sizing-blocks", "4,097")
