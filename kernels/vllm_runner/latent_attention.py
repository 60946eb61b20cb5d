"""Multi-head latent attention on CPUs without AMX, where vLLM computes whole prompts only: no chunk, no cached prefix;
and in float32, for which its kernels with AMX have no weights.

`rank_loading.py` calls `expand_latents` before vLLM reads a model's config. vLLM then computes such a model (DeepSeek
and its relatives) with ordinary attention: keys and values of every head are made from the latents and kept, which
takes several times the memory in the KV cache, and serves chunks and prefixes like any other model.

One operation must be replaced for that. vLLM 0.32's rotary embedding for CPUs takes the parts of the heads that are
rotated as if they lay one behind the other; here they are parts of longer heads, and come out wrong. The same
operation in torch, which is vLLM's own as well, is right.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

_log = logging.getLogger(__name__)


def expand_latents(dtype: str) -> None:
    """Have vLLM compute latent attention with ordinary attention if its own cannot: without AMX, and in float32.

    An operator's `VLLM_MLA_DISABLE` is left as it is.
    """
    if dtype == "float32" or not torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - what vLLM asks, too
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")


def rotate_in_torch(model_config: Any) -> None:
    """Replace the rotary embedding for CPUs in this process, if the model has latents that are expanded."""
    if not model_config.is_deepseek_mla or model_config.use_mla:
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)  # noqa: B010 - vLLM's method
    _log.info("latent attention is computed with keys and values of every head: there is no AMX, or no float32 with it")
