"""Models of random weights through vLLM: windows, experts, and what is refused because one block table is not enough.

The logits that vLLM's runner hands to our sampler are compared with transformers', in float32.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlavaConfig,
    MambaConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
    WhisperConfig,
)

from quipu.kernels.checkpoints import progress
from quipu.kernels.cpu.instruction_sets import processor_flags
from quipu.kernels.models.families import FAMILIES
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.oracles import TOLERANCES, differences
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.vllm_runner.vllm_backends import SIZE, close_all, open_backend, vllm_marks

pytestmark = vllm_marks

VOCAB_SIZE = 320
LENGTH = 200
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
NO_HEADS = {**{name: value for name, value in SHARED.items() if name != "head_dim"}, "hidden_size": 128}
LATENT = {**SHARED, "num_key_value_heads": 4, "head_dim": 32}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10_000.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
SERVED: dict[str, PreTrainedConfig] = {
    # windows in two of three layers, shorter than two blocks
    "windows": Gemma3TextConfig(
        **SHARED, num_hidden_layers=3, sliding_window=40, query_pre_attn_scalar=32, layer_types=WINDOWS,
    ),
    # families that our kernels do not have
    "experts": MixtralConfig(
        **SHARED, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    ),
    "latents": DeepseekV2Config(
        **LATENT, **EXPERTS, num_hidden_layers=2, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=32,
        qk_nope_head_dim=64, v_head_dim=64, n_group=1, topk_group=1, rope_parameters=YARN,
    ),
    "sinks": GptOssConfig(
        **SHARED, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=40,
        layer_types=WINDOWS[:2],
    ),
    "norms after each part": Olmo2Config(**SHARED, num_hidden_layers=2),
    "half of each head rotated": Glm4Config(**SHARED, num_hidden_layers=2, pad_token_id=None, eos_token_id=None),
}  # fmt: skip
MORE: dict[str, PreTrainedConfig] = {
    "deepseek v3": DeepseekV3Config(
        **LATENT, **EXPERTS, num_hidden_layers=2, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=32,
        qk_nope_head_dim=64, v_head_dim=64, n_group=1, topk_group=1,
        # as in published checkpoints; transformers' class has no fields for them
        scoring_func="sigmoid", topk_method="noaux_tc",
    ),
    "glm 4 moe": Glm4MoeConfig(**SHARED, **EXPERTS, num_hidden_layers=2, n_group=1, topk_group=1, pad_token_id=None),
    "granite": GraniteConfig(**NO_HEADS, num_hidden_layers=2, pad_token_id=None),
    "olmo 3": Olmo3Config(**SHARED, num_hidden_layers=3, sliding_window=40, layer_types=WINDOWS),
    "qwen 2 moe": Qwen2MoeConfig(
        **NO_HEADS, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "starcoder 2": Starcoder2Config(**NO_HEADS, num_hidden_layers=2, sliding_window=None),
}  # fmt: skip
"""Families that people run, tried like the others by `-m slow`."""
CONFIGS = {**SERVED, **MORE}
EACH = [*SERVED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


def make_model(folder: Path, config: PreTrainedConfig) -> Path:
    """Make a checkpoint with weights large enough to spread logits."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.1, 0.5)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def logits_of(backend: VllmBackend, *rows: dict[str, Any]) -> torch.Tensor:
    """Run a pass, and return the float32 logits from which its rows drew."""
    seen: list[torch.Tensor] = []
    runner = vars(backend)["_runner"]
    sampler = runner.sampler

    def see(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        seen.append(logits.float().clone())
        return sampler(logits, sampling_metadata)

    runner.sampler = see
    try:
        backend.step(make_batch(*rows))
    finally:
        runner.sampler = sampler
    return seen[0]


@pytest.mark.parametrize("name", EACH)
def test_logits(tmp_path: Path, name: str) -> None:
    """Cold, in chunks, behind blocks of another sequence, and token by token: near transformers'."""
    folder = make_model(tmp_path / name, CONFIGS[name])
    tokens = prompt(LENGTH, seed=3)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        theirs = model(torch.tensor([tokens])).logits[0].float()
    backend = open_backend(folder, dtype="float32", max_model_len=512)
    first, second = scattered_blocks(7, seed=1), scattered_blocks(14, seed=2)[7:]
    whole = logits_of(backend, {"position": 0, "token_ids": tokens, "blocks": first})
    chunks = [
        logits_of(backend, {"position": at, "token_ids": tokens[at : at + 48], "blocks": second, "slot": 1})
        for at in range(0, LENGTH, 48)
    ]
    shared = LENGTH // SIZE
    warm = {"position": shared * SIZE, "token_ids": tokens[shared * SIZE :], "blocks": [*first[:shared], second[6]]}
    each = [
        logits_of(backend, {"position": at, "token_ids": tokens[at : at + 1], "blocks": second, "slot": 3})
        for at in range(150, LENGTH)
    ]
    for ours, at in (
        (whole, [LENGTH - 1]),
        (torch.cat(chunks), [*range(47, LENGTH, 48), LENGTH - 1]),
        (logits_of(backend, {**warm, "slot": 2}), [LENGTH - 1]),
        (torch.cat(each), list(range(150, LENGTH))),
    ):
        found, allowed = differences(ours, theirs[at]), TOLERANCES["float32"]
        assert found.regret <= allowed.regret and found.mean <= allowed.mean and found.p99 <= allowed.p99, found


def test_a_family_that_is_not_ours() -> None:
    """One of them, at least, is what this executor is for."""
    assert SERVED["experts"].model_type == "mixtral" and "MixtralForCausalLM" not in FAMILIES


@pytest.mark.skipif("amx_tile" in processor_flags(), reason="vLLM's own latent attention has chunks with AMX")
def test_latents_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own latent attention, if it is asked for, is refused where it has no chunks, with the reason."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    folder = make_model(tmp_path / "latents", CONFIGS["latents"])
    with pytest.raises(
        ValueError, match="DeepseekV2ForCausalLM here only in whole prompts: no chunk, no cached prefix"
    ):
        VllmBackend(backend_config(folder, block_size=SIZE, max_model_len=512))


ENCODER = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
HYBRID = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_experts": 4}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "BertModel": (BertConfig(vocab_size=99, **ENCODER), "is a pooling model"),
    "LlavaForConditionalGeneration": (LlavaConfig(), "reads more than text"),
    "MambaForCausalLM": (MambaConfig(vocab_size=99, hidden_size=64), "keeps a state"),
    "WhisperForConditionalGeneration": (WhisperConfig(vocab_size=99, d_model=64), "has an encoder"),
    "Qwen3NextForCausalLM": (Qwen3NextConfig(**SHARED, num_hidden_layers=4, **HYBRID), "keeps a state"),
}
"""Models that vLLM serves, and that need more than text and one block table, by their classes."""


@pytest.mark.parametrize(
    "name", [*list(REFUSED)[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in list(REFUSED)[3:])]
)
def test_models_that_are_refused(tmp_path: Path, name: str) -> None:
    """A model that needs more than this executor has is named, with the reason, and with what serves it."""
    config, reason = REFUSED[name]
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{name} {reason}.*--upstream"):
        VllmBackend(backend_config(tmp_path, block_size=SIZE, max_model_len=256, load_format="dummy"))


def test_unknown_model_is_refused(tmp_path: Path) -> None:
    """What vLLM does not know either is refused with what it says."""
    (tmp_path / "config.json").write_text('{"architectures": ["WarpForCausalLM"], "model_type": "warp"}')
    with pytest.raises(ValueError, match="vLLM refuses this model or its settings"):
        VllmBackend(backend_config(tmp_path, block_size=SIZE))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "fp8_per_block",
            "--quantization fp8_per_block: vLLM cannot load this here",
            marks=pytest.mark.skipif("amx_tile" in processor_flags(), reason="vLLM has a kernel for it with AMX"),
        ),
        ("int8", "no method of vLLM's"),
    ],
)
def test_quantizations_that_are_refused(qwen3: Path, name: str, message: str) -> None:
    """A method for which vLLM has no kernel here, and one that is not vLLM's."""
    with pytest.raises(ValueError, match=message):
        VllmBackend(backend_config(qwen3, block_size=SIZE, dtype="bfloat16", quantization=name))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("misses a tensor", "checkpoint lacks tensor model.norm.weight"),
        ("misses a part of a fused one", "checkpoint lacks tensor model.layers.1.self_attn.k_proj.weight"),
        ("another shape", "cannot load its weights: .*63"),
        ("cut off", "cannot"),
    ],
)
def test_broken_checkpoints(qwen3: Path, tmp_path: Path, breaks: str, message: str) -> None:
    """What vLLM raises while it reads weights is a refusal, after which nothing would be tried again."""
    folder = Path(shutil.copytree(qwen3, tmp_path / "broken"))
    stored, name = folder / "model.safetensors", "model.norm.weight"
    tensors = load_file(stored)
    if breaks == "misses a tensor":
        del tensors[name]
    elif breaks == "misses a part of a fused one":
        del tensors["model.layers.1.self_attn.k_proj.weight"]
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, stored)
    if breaks == "cut off":
        os.truncate(stored, stored.stat().st_size // 2)
    with pytest.raises(ValueError, match=message):
        VllmBackend(backend_config(folder, block_size=SIZE, num_blocks=160, enforce_eager=True))


def test_quantized_while_loading(qwen3: Path) -> None:
    """A method for which it has one: near the logits of the weights as they are, and not equal."""
    tokens, blocks = prompt(LENGTH, seed=9), scattered_blocks(7, seed=4)
    row = {"position": 0, "token_ids": tokens, "blocks": blocks}
    plain = logits_of(open_backend(qwen3, dtype="bfloat16"), row)
    backend = open_backend(qwen3, dtype="bfloat16", quantization="fp8_per_channel")
    assert backend.capabilities.weights == "fp8_per_channel"
    quantized = logits_of(backend, row)
    assert not torch.equal(plain, quantized)
    assert torch.nn.functional.cosine_similarity(plain, quantized, dim=-1).min() > 0.97


def test_progress(qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many of the checkpoint's bytes are read, as with other executors; nothing for random weights."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "quipu.kernels")
    close_all()
    open_backend(qwen3)
    said = [record.getMessage() for record in caplog.records if record.name == progress.__name__]
    num_bytes = sum(file.stat().st_size for file in qwen3.glob("*.safetensors"))
    assert len(said) > 5 and all(line.startswith("loading weights: ") for line in said[:-1])
    assert said[0].endswith(f"of {num_bytes} bytes") and said[-2].startswith(f"loading weights: {99} %")
    assert said[-1].startswith("weights are loaded: ")
    caplog.clear()
    open_backend(qwen3, load_format="dummy")
    assert not [record for record in caplog.records if record.name == progress.__name__]


CODE = """
import os

from transformers import PretrainedConfig

os.environ["CODE_OF_THE_CHECKPOINT"] = "was run"


class Made(PretrainedConfig):
    model_type = "made"
"""


def test_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a checkpoint is run only if it is trusted, and refused by the flag's name otherwise."""
    (tmp_path / "made.py").write_text(CODE)
    entries = {"architectures": ["MadeForCausalLM"], "model_type": "made", "auto_map": {"AutoConfig": "made.Made"}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    monkeypatch.setenv("CODE_OF_THE_CHECKPOINT", "was not run")
    for trusts, message in ((False, "trust-remote-code|trust_remote_code"), (True, "MadeForCausalLM")):
        assert os.environ["CODE_OF_THE_CHECKPOINT"] == "was not run"
        with pytest.raises(ValueError, match=message):
            VllmBackend(backend_config(tmp_path, block_size=SIZE, max_model_len=64, trust_remote_code=trusts))
    assert os.environ["CODE_OF_THE_CHECKPOINT"] == "was run"


@pytest.mark.parametrize("size", [16, 48])
def test_block_sizes(qwen3: Path, size: int) -> None:
    """Sizes that the attention does not take are refused with the flag that helps."""
    with pytest.raises(ValueError, match="add --block-size 32"):
        VllmBackend(backend_config(qwen3, block_size=size))


def test_larger_blocks(qwen3: Path) -> None:
    """Blocks of 64 tokens are blocks of 64 tokens for the runner, too."""
    backend = open_backend(qwen3, block_size=64, num_blocks=40)
    assert backend.memory_plan.block_size == 64
    tokens = prompt(LENGTH, seed=5)
    whole = logits_of(backend, {"position": 0, "token_ids": tokens, "blocks": [9, 3, 17, 4]})
    rest = {"position": 128, "token_ids": tokens[128:], "blocks": [9, 3, 5, 6], "slot": 1}
    assert torch.allclose(logits_of(backend, rest), whole, atol=1e-3)


def test_memory(qwen3: Path) -> None:
    """The size of the cache follows the operator's settings, or what the largest pass leaves."""
    block_bytes = open_backend(qwen3).memory_plan.block_bytes
    plan = open_backend(qwen3, num_blocks=None).memory_plan
    assert plan.num_blocks == 1 + 16 * 1024 // SIZE and plan.workspace_bytes is not None
    assert block_bytes == 2 * 2 * 2 * SIZE * 32 * 4  # keys and values, layers, heads, slots, elements, bytes
    close_all()
    with pytest.raises(ValueError, match="max_model_len"):
        VllmBackend(backend_config(qwen3, block_size=SIZE, num_blocks=9, enforce_eager=True))
    shorter = open_backend(qwen3, num_blocks=9, may_shorten=True)
    assert shorter.memory_plan.max_model_len == 8 * SIZE
