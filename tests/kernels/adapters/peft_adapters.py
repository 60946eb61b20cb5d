"""Adapters made by PEFT for the tests' checkpoints, and the logits of PEFT on torch, which are the oracle."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quipu.kernels.batch import StepBatch
from tests.kernels.one_prompt import Backend
from tests.kernels.oracles import TOKENS
from tests.kernels.step_batches import make_batch, scattered_blocks

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NUM_DECODES = 16
"""Of TOKENS, the last; they begin in the middle of a block and end behind the next, and are most of the time."""
_FUSED_EXPERTS = ("qwen3-moe", "olmoe", "gpt-oss", "glm4-moe", "granite-moe", "granite-4-moe", "phimoe", "gemma4")
"""Of these PEFT takes the names of MLPs for those of experts, which transformers has fused."""
SEPARATE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
_GEMMA3N = [
    *("linear_left", "linear_right", "modality_router", "prediction_coefs", "correction_coefs"),
    *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
    *(f"altup_{kind}.{index}" for kind in ("projections", "unembed_projections") for index in range(2)),
]


def targets_of(name: str) -> list[str]:
    """Return all modules of a layer that adapters may change, for a checkpoint of `CONFIGS`."""
    if name.startswith("deepseek"):
        queries = ["q_proj"] if name == "deepseek-v2-lite" else ["q_a_proj", "q_b_proj"]
        return [*queries, "kv_a_proj_with_mqa", "o_proj"]
    if name == "starcoder2":
        return [*ATTENTION, "c_fc", "c_proj"]
    if name == "granite-4":
        return [*ATTENTION, "input_linear", "output_linear"]
    if name.startswith("gemma3n"):
        return [*SEPARATE, *_GEMMA3N]
    if name in ("glm", "glm4"):
        return [*ATTENTION, "gate_up_proj", "down_proj"]
    if name in _FUSED_EXPERTS:
        return ATTENTION
    return FUSED if name.startswith("phi") else SEPARATE


def wrapped(model_path: Path, dtype: str, **settings: Any) -> Any:
    """Return a model with a new adapter, as `LoraConfig(**settings)` describes it, whose matrices are random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' names in PEFT, and of what is saved for tied heads
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(settings.get("r", 8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.6 * parameter.shape[1] ** -0.5)
    return model


def make_adapter(folder: Path, model_path: Path, **settings: Any) -> Path:
    """Save a new adapter as PEFT does, of rank 4 and for q and v by default."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped(model_path, "float32", **settings).save_pretrained(folder, save_embedding_layers=False)
    return folder


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors."""
    path = folder / "adapter_model.safetensors"
    changed = load_file(path) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)


@cache
@torch.inference_mode()
def run_peft(model_path: Path, adapter: Path, dtype: str, *, merged: bool = False) -> torch.Tensor:
    """Return PEFT's logits of all TOKENS, with the adapter's matrices in the dtype of the model, as ours are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        model: Any = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        if merged:
            model = model.merge_and_unload()
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0].float()
    return logits


def with_adapters(batch: StepBatch, *digests: str) -> StepBatch:
    return attrs.evolve(batch, adapters=list(digests))


def run_adapted(backend: Backend, digest: str) -> torch.Tensor:
    """Return the logits of all TOKENS with an adapter: one prefill, then steps of one token."""
    blocks, num_prefill = scattered_blocks(23, seed=1), len(TOKENS) - NUM_DECODES
    prefill = make_batch({"token_ids": TOKENS[:num_prefill], "position": 0, "blocks": blocks})
    logits = [backend.logits(with_adapters(prefill, digest), list(range(num_prefill)))]
    for position in range(num_prefill, len(TOKENS)):
        step = make_batch({"token_ids": [TOKENS[position]], "position": position, "blocks": blocks})
        logits.append(backend.logits(with_adapters(step, digest), [0]))
    return torch.cat(logits)
