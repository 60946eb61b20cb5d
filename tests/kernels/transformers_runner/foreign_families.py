"""Small random models, nearly all of families that have no kernels of ours, and backends over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Dots1Config,
    Ernie4_5Config,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeConfig,
    HeliumConfig,
    MiniCPM3Config,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    PersimmonConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)

from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend
from tests.kernels.family_configs import VOCAB_SIZE
from tests.kernels.kernel_checkpoints import backend_config

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
_HEADS: dict[str, Any] = {**_SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    # a part of each head rotated, attention and MLP side by side, every head its own keys
    "gpt-neox": lambda: GPTNeoXConfig(**_SHARED, num_attention_heads=4, intermediate_size=96),
    # learned positions; fused projections
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    # learned positions with an offset; embeddings narrower than the model
    "opt": lambda: OPTConfig(**_SHARED, num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=32),
    # a window in all layers
    "starcoder2": lambda: Starcoder2Config(**_HEADS, sliding_window=40),
    "stablelm": lambda: StableLmConfig(**_HEADS),
    # logits with a factor
    "cohere": lambda: CohereConfig(**_HEADS, logit_scale=0.5),
    # a window in one layer, positions in it alone
    "cohere2": lambda: Cohere2Config(
        **_HEADS, logit_scale=0.5, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: PhiConfig(**_HEADS),
    "phi3.5-moe": lambda: PhimoeConfig(**_HEADS, **_EXPERTS),
    "mixtral": lambda: MixtralConfig(**_HEADS, **_EXPERTS, sliding_window=40),
    "nemotron": lambda: NemotronConfig(**_HEADS),
    "granite-moe": lambda: GraniteMoeConfig(**_HEADS, **_EXPERTS),
    "helium": lambda: HeliumConfig(**_HEADS, head_dim=16),
    "ernie4.5": lambda: Ernie4_5Config(**_HEADS, head_dim=16),
    "dots1": lambda: Dots1Config(**_HEADS, **_ROUTED),
    "glm4-moe": lambda: Glm4MoeConfig(**_HEADS, **_ROUTED, pad_token_id=None),
    "persimmon": lambda: PersimmonConfig(**_SHARED, num_attention_heads=4, intermediate_size=96),
    # sinks, and a window in one layer
    "gpt-oss": lambda: GptOssConfig(
        **_HEADS, **_EXPERTS, head_dim=16, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
    ),
    # caps on scores and on logits
    "gemma2": lambda: Gemma2Config(
        **_HEADS, head_dim=16, sliding_window=40, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    # keys wider than values
    "minicpm3": lambda: MiniCPM3Config(
        **{**_HEADS, "num_key_value_heads": 4}, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    ),
}  # fmt: skip


def make_model(folder: Path, config: PreTrainedConfig) -> Path:
    """Make a checkpoint with weights large enough to spread logits."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def make_transformers_backend(folder: Path, **changes: Any) -> TransformersBackend:
    """Make a backend whose cache is filled with NaN, so that reading an unwritten slot is detected."""
    backend = TransformersBackend(backend_config(folder, **{"max_model_len": 512, **changes}))
    backend.cache.fill(float("nan"))
    return backend
