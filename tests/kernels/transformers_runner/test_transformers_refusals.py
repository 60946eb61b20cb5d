"""What `--executor transformers` refuses, by name: settings, models, checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    BertConfig,
    DiffLlamaConfig,
    FalconConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    PhimoeConfig,
    PreTrainedConfig,
    RwkvConfig,
    T5Config,
)
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.starcoder2 import modeling_starcoder2

from quipu.kernels.load import load_backend
from quipu.kernels.models.families import find_family
from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend
from quipu.kernels.transformers_runner.transformers_settings import check_installed, dtype_of
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.transformers_runner.foreign_families import CONFIGS, make_model
from tests.tiny import TINY

_SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


def load_config(folder: Path, config: PreTrainedConfig, architecture: str, **changes: Any) -> TransformersBackend:
    """Load random weights for a configuration."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return TransformersBackend(backend_config(folder, load_format="dummy", **{"max_model_len": 256, **changes}))


def test_other_spelling(tmp_path: Path) -> None:
    """A family that a checkpoint spells otherwise than transformers is found."""
    sizes: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    backend = load_config(tmp_path, PhimoeConfig(**_SMALL, **sizes, num_local_experts=4), "PhiMoEForCausalLM")
    assert backend.capabilities.name == "transformers"


@pytest.mark.parametrize(
    ("make", "architecture", "message"),
    [
        (
            lambda: MambaConfig(**_SMALL),
            "MambaForCausalLM",
            "MambaForCausalLM has layers of the types linear_attention",
        ),
        (lambda: RwkvConfig(**_SMALL), "RwkvForCausalLM", "RwkvForCausalLM keeps a state besides a KV cache"),
        (lambda: T5Config(vocab_size=99, d_model=64, num_layers=2), "T5ForConditionalGeneration", "has an encoder"),
        (
            lambda: FalconConfig(**_SMALL, num_attention_heads=4),
            "FalconForCausalLM",
            "FalconForCausalLM has attention code of its own",
        ),
        (
            lambda: MptConfig(vocab_size=99, d_model=64, n_layers=2, n_heads=4),
            "MptForCausalLM",
            "MptForCausalLM has attention code of its own",
        ),
        (
            lambda: Lfm2Config(**_SMALL, num_attention_heads=4, layer_types=["conv", "full_attention"]),
            "Lfm2ForCausalLM",
            "layers of the types conv: the transformers executor serves full_attention and sliding_attention",
        ),
        (
            lambda: BertConfig(**_SMALL, num_attention_heads=4),
            "BertForMaskedLM",
            "no causal language model BertForMaskedLM: it would load BertLMHeadModel",
        ),
        (
            lambda: DiffLlamaConfig(**_SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
            "DiffLlamaForCausalLM",
            "DiffLlamaForCausalLM needs attention more than once in layer 0, which the transformers executor does not",
        ),
        (
            lambda: LlamaConfig(**_SMALL, num_attention_heads=4, intermediate_size=96, rope_parameters=_DYNAMIC),
            "LlamaForCausalLM",
            "rope_type 'dynamic' changes the rotation of earlier tokens",
        ),
    ],
)
def test_models(tmp_path: Path, make: Callable[[], PreTrainedConfig], architecture: str, message: str) -> None:
    """What needs more than one block table, or has attention that cannot be ours, is named before it serves."""
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path, make(), architecture)


def test_unknown_models(tmp_path: Path) -> None:
    """What transformers does not know is refused in its words, and nothing is fetched."""
    (tmp_path / "config.json").write_text('{"architectures": ["WarpForCausalLM"], "model_type": "warp"}')
    with pytest.raises(ValueError, match=r"transformers cannot load WarpForCausalLM: .*`warp`"):
        TransformersBackend(backend_config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names 0 architectures"):
        TransformersBackend(backend_config(tmp_path))


def test_lengths(tmp_path: Path) -> None:
    """A length beyond the table of positions is refused before a token is beyond it."""
    config = CONFIGS["gpt2"]()
    with pytest.raises(ValueError, match="max_model_len 513 exceeds the model's max_position_embeddings 512"):
        load_config(tmp_path, config, "GPT2LMHeadModel", max_model_len=513)


def planted_neighbour(x_1ND: torch.Tensor) -> torch.Tensor:
    """Add to each token a part of the one before it in the pass, whichever sequence that is of."""
    return x_1ND + 0.5 * x_1ND.roll(1, dims=1)


def planted_order(x_1ND: torch.Tensor) -> torch.Tensor:
    """Add to each token its number in the pass, as a table of positions does that ignores `position_ids`."""
    return x_1ND + torch.arange(x_1ND.shape[1]).view(1, -1, 1) * torch.linspace(-1, 1, x_1ND.shape[2])


@pytest.mark.parametrize("change", [planted_neighbour, planted_order])
def test_what_only_logits_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """A model that looks at the other tokens of a pass has other logits in chunks, and is refused for it."""
    forward = modeling_starcoder2.Starcoder2MLP.forward
    monkeypatch.setattr(modeling_starcoder2.Starcoder2MLP, "forward", lambda self, x: change(forward(self, x)))
    with pytest.raises(ValueError, match="Starcoder2ForCausalLM: logits of a prompt in chunks beside another differ"):
        load_config(tmp_path, CONFIGS["starcoder2"](), "Starcoder2ForCausalLM")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "needs attention with position_bias"),
        ({"is_causal": False}, "needs attention with is_causal"),
        ({"sliding_window": 7}, "needs attention with a window of 7 and a mask of 40"),
        ({"dropout": 0.1}, "needs attention with dropout"),
    ],
)
def test_arguments_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    """What a layer asks of attention beyond what is computed is named, not ignored."""
    get = AttentionInterface.get_interface

    def get_with_more(self: Any, name: str, default: Any) -> Any:
        function = get(self, name, default)
        return lambda *tensors, **named: function(*tensors, **{**named, **arguments})

    monkeypatch.setattr(AttentionInterface, "get_interface", get_with_more)
    with pytest.raises(ValueError, match=f"Starcoder2ForCausalLM {message}"):
        load_config(tmp_path, CONFIGS["starcoder2"](), "Starcoder2ForCausalLM")


def test_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is neither causal nor a window is not taken for one."""

    def every_other(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query - key) % 2 == 0

    create = create_sliding_window_causal_mask
    monkeypatch.setattr(
        modeling_starcoder2,
        "create_sliding_window_causal_mask",
        lambda **named: create(**named, and_mask_function=every_other),
    )
    with pytest.raises(ValueError, match="needs a mask that is neither causal nor a sliding window"):
        load_config(tmp_path, CONFIGS["starcoder2"](), "Starcoder2ForCausalLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "starcoder2", CONFIGS["starcoder2"]())


def test_broken_checkpoints(model: Path, tmp_path: Path) -> None:
    """Tensors that are missing or of another shape are named: transformers would make them up."""
    tensors = load_file(model / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ValueError, match="has no safetensors"):
        TransformersBackend(backend_config(tmp_path, max_model_len=256))
    name = "model.layers.1.mlp.c_fc.weight"
    matrix = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"the checkpoint lacks tensor {name}"):
        TransformersBackend(backend_config(tmp_path, max_model_len=256))
    save_file({**tensors, name: matrix[1:].contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"transformers cannot load Starcoder2ForCausalLM|tensors of other shapes"):
        TransformersBackend(backend_config(tmp_path, max_model_len=256))


def test_quantized_checkpoint(model: Path, tmp_path: Path) -> None:
    """A format that needs another library is refused with transformers' own words for it."""
    entries = json.loads((model / "config.json").read_text())
    entries["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    with pytest.raises(ValueError, match=r"transformers cannot load Starcoder2ForCausalLM: .*[Gg][Pp][Tt][Qq]"):
        TransformersBackend(backend_config(tmp_path, max_model_len=256))


CODE = """
import os

from transformers import PretrainedConfig

os.environ["CODE_OF_THE_CHECKPOINT"] = "was run"


class Made(PretrainedConfig):
    model_type = "made"
"""


def test_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a checkpoint is run only if it is trusted, and refused by the flag's name otherwise."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "made.py").write_text(CODE)
    entries = {"architectures": ["MadeForCausalLM"], "model_type": "made", "auto_map": {"AutoConfig": "made.Made"}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    monkeypatch.setenv("CODE_OF_THE_CHECKPOINT", "was not run")
    for trusts, message in ((False, r"\(--trust-remote-code\)"), (True, "MadeForCausalLM")):
        assert os.environ["CODE_OF_THE_CHECKPOINT"] == "was not run"
        with pytest.raises(ValueError, match=message):
            TransformersBackend(backend_config(tmp_path, max_model_len=64, trust_remote_code=trusts))
    assert os.environ["CODE_OF_THE_CHECKPOINT"] == "was run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"determinism": "strict"}, "--determinism strict"),
        ({"determinism": "loose"}, "unknown determinism 'loose'"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"activations": "int8"}, "--activations must not be int8"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"kv_cache_dtype": "fp8"}, "unknown kv_cache_dtype 'fp8'"),
        ({"load_format": "gguf"}, "--load-format gguf"),
        ({"headless": True}, "--task: the transformers executor makes no embeddings"),
        ({"max_loras": 1}, "--enable-lora: the transformers executor applies no adapters"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
    ],
)
def test_settings(changes: dict[str, Any], message: str) -> None:
    """A setting that would be ignored is named."""
    with pytest.raises(ValueError, match=message):
        load_backend("transformers", backend_config(TINY, **changes))


def test_versions() -> None:
    """What is missing is said with how to install it, and so is a version whose interfaces are not known."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    assert check_installed().startswith("5.")
    with pytest.raises(ValueError, match=r"5\.20 or later, below 6, which is not installed \(pip install"):
        check_installed(missing)
    for found in ("4.57.1", "6.0.0"):
        with pytest.raises(ValueError, match=rf"below 6, and {found} is installed"):
            check_installed(lambda _, found=found: found)


def test_other_executors_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is not ours is refused with what would serve it, by what is installed."""
    with pytest.raises(ValueError, match="transformers is installed, with which --executor transformers serves most"):
        find_family({"architectures": ["OPTForCausalLM"]})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="where vLLM or transformers is installed"):
        find_family({"architectures": ["OPTForCausalLM"]})


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "quantization_config": {"quant_method": "awq"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_auto_is_the_checkpoints(tmp_path: Path, entries: dict[str, Any], expected: str) -> None:
    """`--dtype auto` is what the checkpoint says."""
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert dtype_of(backend_config(tmp_path)) == expected
