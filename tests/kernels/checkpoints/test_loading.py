"""Which checkpoints load and which are refused by name: configs, tensors, dtypes, dummies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quipu.kernels.checkpoints.weights import open_weights
from quipu.kernels.load import load_backend
from tests.kernels.kernel_checkpoints import backend_config, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a checkpoint and change its config; None removes an entry."""

    def make(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints[name], folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return make


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' requires factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "requires low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ among layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"max_position_embeddings": 512}, "max_position_embeddings 512"),
        ({"attention_bias": True}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 1}, "does not use: model.layers.1"),
        ({"num_hidden_layers": 3}, "lacks tensor model.layers.2"),
        ({"intermediate_size": 64}, r"gate_proj.weight has shape \(128, 64\), config.json says \(64, 64\)"),
        ({"dtype": "float64"}, "dtype 'float64'"),
    ],
)
def test_refused_by_name(copy: Callable[..., Path], changes: dict[str, Any], named: str) -> None:
    """Refuse what would load but produce nonsense, naming the entry or tensor."""
    with pytest.raises(ValueError, match=named):
        make_backend(copy("llama", **changes))


@pytest.mark.parametrize(("changes", "named"), [({"dtype": "int8"}, "int8"), ({"load_format": "pickle"}, "pickle")])
def test_unknown_settings(checkpoints: dict[str, Path], changes: dict[str, str], named: str) -> None:
    """Refuse an unknown dtype and an unknown load format."""
    with pytest.raises(ValueError, match=named):
        make_backend(checkpoints["llama"], **changes)


def test_unknown_backend(checkpoints: dict[str, Path]) -> None:
    """Refuse an unknown backend."""
    with pytest.raises(ValueError, match="warp"):
        load_backend("warp", backend_config(checkpoints["llama"]))


@pytest.mark.parametrize(
    ("name", "spoil", "named"),
    [
        ("llama", lambda folder: (folder / "config.json").unlink(), "config.json"),
        ("llama", lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        ("llama", lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        ("llama", lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors"),
        ("llama", lambda folder: (folder / "model.safetensors").write_bytes(b"PK"), "cannot be read"),
        ("qwen3-tied", lambda folder: sorted(folder.glob("*-of-*"))[1].unlink(), "lacks file model-00002"),
        ("qwen3-tied", lambda folder: next(folder.glob("*.index.json")).write_text("{}"), "not a valid index"),
    ],
)
def test_broken_folders(copy: Callable[..., Path], name: str, spoil: Callable[[Path], None], named: str) -> None:
    """Name a missing or damaged file."""
    folder = copy(name)
    spoil(folder)
    with pytest.raises(ValueError, match=named):
        make_backend(folder)


def test_unsupported_stored_dtype(copy: Callable[..., Path]) -> None:
    """Refuse integers: they are weights of an undeclared quantization."""
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8"):
        make_backend(folder)


def test_dtype_auto_and_explicit(copy: Callable[..., Path]) -> None:
    """Use the config's dtype for `auto`, under either name, else the tensors'; cast to an explicit one."""
    folder = copy("llama", dtype=None)
    assert make_backend(folder).capabilities.dtype == "float32"
    assert make_backend(folder, dtype="float16").capabilities.dtype == "float16"
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("torch_dtype", "bfloat16"), ("dtype", "torch.float16")):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        assert make_backend(folder).capabilities.dtype == value.removeprefix("torch.")
    backend = make_backend(folder)
    assert backend.cache[0][0].dtype == torch.float16


def test_old_and_new_rope_spelling(copy: Callable[..., Path], checkpoints: dict[str, Path]) -> None:
    """Read `rope_theta` with `rope_scaling` as the equivalent `rope_parameters`."""
    written = json.loads((checkpoints["llama-rope3"] / "config.json").read_text())["rope_parameters"]
    theta = written.pop("rope_theta")
    old = copy("llama-rope3", rope_parameters=None, rope_theta=theta, rope_scaling=written)
    row = make_batch({"token_ids": prompt(200, seed=1), "position": 0, "blocks": scattered_blocks(13, seed=1)})
    assert torch.equal(
        make_backend(old).logits(row, [199]), make_backend(checkpoints["llama-rope3"]).logits(row, [199])
    )


def test_absent_head_dim(copy: Callable[..., Path]) -> None:
    """Default to hidden size / heads for Llama, and to transformers' 128 for Qwen3, which these tensors contradict."""
    make_backend(copy("llama", head_dim=None))
    with pytest.raises(ValueError, match=r"q_proj.weight has shape \(128, 64\), config.json says \(512, 64\)"):
        make_backend(copy("qwen3-tied", head_dim=None))


def test_dummy_needs_only_the_config(copy: Callable[..., Path]) -> None:
    """Make random weights from names: the same in every run, with distinct tensors and rows and finite logits."""
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    row = make_batch({"token_ids": prompt(40, seed=1), "position": 0, "blocks": scattered_blocks(3, seed=1)})
    first, second = (make_backend(folder, load_format="dummy").logits(row, [39]) for _ in range(2))
    assert first.isfinite().all() and first.std() > 0
    assert torch.equal(first, second)
    weights, dtype = open_weights(folder, {}, load_format="dummy", dtype="auto")
    assert dtype == torch.float32
    matrix = weights.tensor("a.weight", (3000, 64))
    assert not torch.equal(matrix, weights.tensor("b.weight", (3000, 64)))
    assert len(matrix.unique(dim=0)) == 3000
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)


def test_contracts_do_not_import_torch() -> None:
    """Import the protocol and the batch without torch, which the web process must never load."""
    code = "import sys, quipu.kernels.backend, quipu.kernels.batch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
