"""Reading adapters: what is refused, by which name, and what their digest is of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quipu.kernels.adapters.adapter_folder import CONFIG, WEIGHTS
from quipu.kernels.load import load_backend
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.adapters.peft_adapters import change_config, change_tensors, make_adapter
from tests.kernels.kernel_checkpoints import backend_config, make_backend

PREFIX = "base_model.model.model.layers.0."
Q_A, Q_B = (f"{PREFIX}self_attn.q_proj.lora_{matrix}.weight" for matrix in "AB")


@pytest.fixture(scope="module")
def backend(checkpoints: dict[str, Path]) -> ReferenceBackend:
    return make_backend(checkpoints["qwen3-moe"], max_loras=1, max_lora_rank=8)


@pytest.fixture
def adapter(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", checkpoints["qwen3-moe"])


def header(text: bytes, *, length: int | None = None) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes((length or len(text)).to_bytes(8, "little") + text)


def entries(*names: str, **changes: object) -> Callable[[Path], object]:
    """Write a header with entries of these names, each of one number."""
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes})
    return header(b"{%s}" % b",".join(b"%s:%s" % (json.dumps(name).encode(), entry.encode()) for name in names))


def deep_config(folder: Path) -> None:
    (folder / CONFIG).write_text("[" * 100_000)


def fifo(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def folder_of_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"no {CONFIG}"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "safetensors only"),
    "config is a list": (lambda folder: (folder / CONFIG).write_text("[]"), "not a JSON object"),
    "config is not JSON": (lambda folder: (folder / CONFIG).write_bytes(b"\xff{"), "not JSON"),
    "config is deep": (deep_config, "nested"),
    "config is nested": (lambda folder: change_config(folder, x=json.loads("[" * 200 + "]" * 200)), "nested"),
    "config is large": (lambda folder: (folder / CONFIG).write_bytes(b" " * (2 << 20)), "at most"),
    "config is a pipe": (fifo, "not a regular file"),
    "weights are a folder": (folder_of_weights, "regular file"),
    "weights are huge": (lambda folder: os.truncate(folder / WEIGHTS, 1 << 40), "at most"),
    "weights are empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "cannot be read"),
    "weights are cut": (lambda folder: os.truncate(folder / WEIGHTS, 2000), "truncated"),
    "header is too long": (header(b"{}", length=1 << 60), "header"),
    "header is deep": (header(b"[" * 100_000), "nested too deeply"),
    "a name that is no text": (entries("half \ud800"), r"invalid name of a tensor, 'half \\ud800'"),
    "a name of many characters": (entries("a" * 100_000), "invalid name of a tensor, 'a{50,100}...$"),
    "numbers of many digits": (entries(Q_A, shape=[10**4000] * 1000), f"invalid header entry for tensor {Q_A}$"),
    "many dimensions": (entries(Q_A, shape=[1] * 1000), f"invalid header entry for tensor {Q_A}$"),
    "a dtype of many characters": (entries(Q_A, dtype="F" * 100_000), f"invalid header entry for tensor {Q_A}$"),
    "many names, and one twice": (entries(*map(str, range(50_000)), "7"), "damaged .7 is in it twice"),
    "a rank beyond the limit": (lambda folder: change_config(folder, r=9), "rank 9.*--max-lora-rank"),
    "another rank": (lambda folder: change_config(folder, r=5), "shape"),
    "no module": (lambda folder: change_config(folder, target_modules=["query"]), "not target"),
    "a tensor too few": (lambda folder: change_tensors(folder, **{Q_B: None}), f"lacks tensor {Q_B}"),
    "a module not targeted": (lambda folder: change_config(folder, target_modules=["v_proj"]), f"{Q_A}.*not target"),
    "a module too few": (
        lambda folder: change_config(folder, target_modules=["q_proj", "v_proj", "o_proj"]),
        "lacks tensor .*o_proj",
    ),
    "a tensor of another kind": (
        lambda folder: change_tensors(folder, **{PREFIX + "self_attn.q_proj.lora_magnitude_vector": torch.ones(3)}),
        "lora_magnitude_vector",
    ),
    "a saved module": (
        lambda folder: change_tensors(folder, **{"base_model.model.lm_head.weight": torch.ones(3, 3)}),
        "lm_head",
    ),
    "an expert": (
        lambda folder: change_tensors(
            folder, **{PREFIX.replace("0", "1") + "mlp.experts.3.up_proj.lora_A.weight": torch.ones(4, 64)}
        ),
        r"layers.1.mlp.experts.3.up_proj are not supported",
    ),
    "a router": (
        lambda folder: change_tensors(
            folder, **{PREFIX.replace("0", "1") + "mlp.gate.lora_B.weight": torch.ones(11, 4)}
        ),
        r"layers.1.mlp.gate are not supported",
    ),
    "the embedding": (
        lambda folder: change_tensors(
            folder, **{"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 320)}
        ),
        r"model.embed_tokens are not supported",
    ),
    "NaN": (lambda folder: change_tensors(folder, **{Q_A: torch.full((4, 64), torch.nan)}), f"{Q_A} .*not finite"),
    "infinity": (lambda folder: change_tensors(folder, **{Q_B: torch.full((128, 4), torch.inf)}), "not finite"),
    "an integer dtype": (lambda folder: change_tensors(folder, **{Q_A: torch.ones(4, 64, dtype=torch.int8)}), "I8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_adapters(backend: ReferenceBackend, adapter: Path, name: str) -> None:
    """Refuse each with a message that names what is wrong, and keep the slot."""
    spoil, said = BROKEN[name]
    spoil(adapter)
    with pytest.raises(ValueError, match=said):
        backend.load_adapter(adapter)


def test_scale_that_overflows(backend: ReferenceBackend, adapter: Path) -> None:
    """Refuse a scale by which finite matrices become infinite."""
    change_tensors(adapter, **{Q_B: torch.full((128, 4), 1e30)})
    change_config(adapter, lora_alpha=1e15)
    with pytest.raises(ValueError, match=r"not finite after multiplying it by .* in float32"):
        backend.load_adapter(adapter)


def test_digest(backend: ReferenceBackend, adapter: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Be of the bytes of both files and nothing else: not of the name, and changed by any change."""
    digests = [backend.load_adapter(adapter)]
    backend.unload_adapter(digests[0])
    assert backend.load_adapter(adapter.rename(tmp_path / "other"), digests[0]) == digests[0]
    backend.unload_adapter(digests[0])
    change_config(tmp_path / "other", lora_dropout=0.25)
    with pytest.raises(ValueError, match="has changed"):
        backend.load_adapter(tmp_path / "other", digests[0])
    digests.append(backend.load_adapter(tmp_path / "other"))
    backend.unload_adapter(digests[1])
    change_tensors(tmp_path / "other", **{Q_A: torch.ones(4, 64)})
    digests.append(backend.load_adapter(tmp_path / "other"))
    backend.unload_adapter(digests[2])
    assert len(set(digests)) == 3


@pytest.mark.parametrize("executor", ["reference", "fake"])
def test_no_slots(checkpoints: dict[str, Path], adapter: Path, executor: str) -> None:
    """Load nothing unless slots are configured."""
    backend = load_backend(executor, backend_config(checkpoints["qwen3-moe"]))
    with pytest.raises(ValueError, match="--max-loras"):
        backend.load_adapter(adapter)
