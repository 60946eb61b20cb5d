"""What GGUF files say of the tests' checkpoints beside their tensors, and how such a file is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quipu.kernels.checkpoints.gguf_folder import make_gguf_folder
from quipu.kernels.checkpoints.weights import PieceByPiece, open_weights
from quipu.kernels.models.config import DecoderConfig, read_config
from quipu.kernels.models.families import find_family
from tests.kernels.checkpoints.gguf_files import write_gguf

LLAMA3_FACTORS = np.array([1.0, 1.0, 1.0, 1.0, 1.5, 4.0, 8.0, 8.0], dtype=np.float32)
_EXPERTS_OF_LATENT = {
    "rope.dimension_count": 16,
    "attention.kv_lora_rank": 48,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 2,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS_OF_LATENT,
    "attention.key_length": 64,
    "attention.value_length": 48,
    "expert_count": 6,
    "expert_used_count": 3,
    "leading_dense_block_count": 1,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 0.5,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
_OLDER_LATENT: dict[str, Any] = {
    **_EXPERTS_OF_LATENT,
    "attention.key_length": 40,
    "attention.value_length": 40,
    "expert_count": 8,
    "expert_used_count": 5,
    "expert_group_count": 4,
    "expert_group_used_count": 3,
    "expert_weights_scale": 1.25,
    "leading_dense_block_count": 0,
}
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3-tied": ("qwen3", {}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "mistral": (
        "llama",
        {"attention.sliding_window": 270, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "ministral3": (
        "mistral3",
        {
            "attention.temperature_scale": 0.3,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 0.5,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "qwen3-moe": ("qwen3moe", {"expert_count": 11, "expert_used_count": 3, "expert_feed_forward_length": 40}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 33, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3",
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, False, True],
            "final_logit_softcapping": 8.0,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3n": (
        "gemma3n",
        {
            "activation_sparsity_scale": [
                *(float(torch.distributions.Normal(0, 1).icdf(torch.tensor(share))) for share in (0.9, 0.6)),
                *[-math.inf] * 4,
            ],
            "altup.active_idx": 2,
            "altup.num_inputs": 3,
            "attention.shared_kv_layers": 3,
            "attention.sliding_window": 30,
            "attention.sliding_window_pattern": [True, False] * 3,
            "embedding_length_per_layer_input": 16,
            "final_logit_softcapping": 5.0,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "attention.head_count_kv": [2, 1, 1] * 2,
            "feed_forward_length": [96] * 3 + [192] * 3,
            "attention.key_length": 48,
            "attention.value_length": 48,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "attention.sliding_window": 30,
            "attention.sliding_window_pattern": [True, False, False] * 2,
            "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 16,
            "expert_count": 5,
            "expert_used_count": 4,
            "expert_feed_forward_length": 40,
            "final_logit_softcapping": 5.0,
            "rope.dimension_count": 48,
            "rope.dimension_count_swa": 32,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope_freqs.weight": np.array([1.0] * 6 + [1e30] * 18, dtype=np.float32),
        },
    ),
    "phi3": (
        "phi3",
        {
            "attention.sliding_window": 100,
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": 1.0488088,
            "rope_factors_short.weight": np.array([1.0, 1.5, 2.5, 4.0], dtype=np.float32),
            "rope_factors_long.weight": np.array([2.0, 8.0, 20.0, 40.0], dtype=np.float32),
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "attention.sliding_window": 60,
            "expert_count": 6,
            "expert_used_count": 2,
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": 1.2,
            "rope_factors_short.weight": np.array([1.0 + number / 4 for number in range(8)], dtype=np.float32),
            "rope_factors_long.weight": np.array([2.0 + number for number in range(8)], dtype=np.float32),
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "expert_count": 5,
            "expert_used_count": 4,
            "expert_feed_forward_length": 64,
            "attention.sliding_window": 50,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 0.5,
        },
    ),
    "phi4": ("phi3", {"rope.freq_base": 250_000.0, "rope.dimension_count": 24}),
    "cohere2": ("cohere2", {"attention.sliding_window": 50, "logit_scale": 0.5, "attention.sliding_window_pattern": 2}),
    "stablelm": ("stablelm", {"rope.dimension_count": 8, "use_parallel_residual": True}),
    "stablelm-parallel": ("stablelm", {"rope.dimension_count": 4}),
    "starcoder2": ("starcoder2", {"attention.sliding_window": 60}),
    "granite": (
        "granite",
        {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 3.0},
    ),
    "llama4": (
        "llama4",
        {
            "feed_forward_length": 96,
            "expert_count": 5,
            "expert_used_count": 4,
            "expert_feed_forward_length": 40,
            "interleave_moe_layer_step": 2,
            "rope.freq_base": 500_000.0,
            "rope.dimension_count": 32,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "expert_count": 6,
            "expert_used_count": 4,
            "attention.scale": 0.1,
            "embedding_scale": 8.0,
            "residual_scale": 0.22,
            "logit_scale": 2.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo2",
        {
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, False],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 0.5,
        },
    ),
    "olmoe": ("olmoe", {"expert_count": 7, "expert_used_count": 6}),
    "seed-oss": ("seed_oss", {}),
    "glm4": ("glm4", {"rope.dimension_count": 8}),
    "glm": ("chatglm", {"rope.dimension_count": 16}),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "exaone4": (
        "exaone4",
        {"attention.sliding_window": 50, "attention.sliding_window_pattern": [True, False]},
    ),
    "glm4-moe": (
        "glm4moe",
        {
            "rope.dimension_count": 8,
            "expert_count": 6,
            "expert_used_count": 4,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 0.75,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 0,
        },
    ),
    "qwen2-moe": (
        "qwen2moe",
        {
            "expert_count": 5,
            "expert_used_count": 4,
            "expert_feed_forward_length": 40,
            "expert_shared_feed_forward_length": 56,
        },
    ),
    "deepseek-v2-lite": ("deepseek2", {**_LATENT, "attention.key_length_mla": 40, "attention.value_length_mla": 40}),
    "deepseek-v2": ("deepseek2", {**_OLDER_LATENT, "attention.q_lora_rank": 40}),
}


def convert(path: Path, checkpoint: Path, name: str, **more: Any) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    architecture, keys = KEYS[name]
    held = write_gguf(path, architecture, checkpoint, keys=keys, **more)
    return make_gguf_folder(path), held


def parsed(folder: Path) -> DecoderConfig:
    config = read_config(folder)
    return find_family(config).parse(config)


def opened(folder: Path, dtype: str = "auto", **more: Any) -> PieceByPiece:
    return open_weights(folder, read_config(folder), load_format="auto", dtype=dtype, **more)[0]
