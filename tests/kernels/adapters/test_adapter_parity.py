"""Logits with adapters, compared with PEFT's on torch, for every family and both backends.

The tolerances are those of the families without adapters (`tests/kernels/oracles.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests.kernels.adapters.peft_adapters import make_adapter, run_adapted, run_peft, targets_of
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of
from tests.kernels.cpu.test_paths import CLOSE
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import CPU_FORMATS, FORMATS, make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.oracles import check, differences

BACKENDS = [make_backend, pytest.param(partial(make_cpu_backend, num_threads=2), marks=needs_kernels)]
over_backends = pytest.mark.parametrize("make", BACKENDS, ids=["reference", "cpu"])


@pytest.fixture(scope="session")
def adapters(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make an adapter of each checkpoint's whole layers."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(root / name, checkpoints[name], target_modules=targets_of(name), r=8, lora_alpha=8)
        for name in CONFIGS
    }


@over_backends
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_peft(
    checkpoints: dict[str, Path], adapters: dict[str, Path], name: str, make: Callable[..., Backend]
) -> None:
    """Match PEFT's logits at every position, with the adapter beside the model and merged into it."""
    for dtype in ("float32", "bfloat16"):
        backend = make(checkpoints[name], dtype=dtype, max_loras=1)
        ours = run_adapted(backend, backend.load_adapter(adapters[name]))
        for merged in (False, True):
            theirs = run_peft(checkpoints[name], adapters[name], dtype, merged=merged)
            check(name, dtype, differences(ours, theirs), adapted=True)


@over_backends
def test_adapters_change_the_logits(
    checkpoints: dict[str, Path], adapters: dict[str, Path], make: Callable[..., Backend]
) -> None:
    """Differ from the model alone by about as much as the logits themselves vary: no parity by doing nothing."""
    backend = make(checkpoints["llama"], dtype="float32", max_loras=1)
    adapted = run_adapted(backend, backend.load_adapter(adapters["llama"]))
    assert differences(adapted, run_adapted(backend, "")).mean > 0.1


SETTINGS: dict[str, dict[str, object]] = {
    "head": {"target_modules": ["lm_head"]},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}},
    "expression": {"target_modules": r".*\.[01]\.(self_attn|mlp)\.(k|down)_proj", "r": 16},
    "one-layer": {
        "target_modules": ["up_proj", "q_proj"],
        "layers_to_transform": [1],
        "exclude_modules": ["mlp.up_proj"],
    },
}


@pytest.fixture(scope="module")
def make_with(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Make each adapter once for both backends, of which PEFT's logits are then computed once."""
    return cache(
        lambda name, settings: make_adapter(tmp_path_factory.mktemp("adapter"), checkpoints[name], **SETTINGS[settings])
    )


@pytest.mark.covering
@over_backends
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_settings(
    checkpoints: dict[str, Path],
    make_with: Callable[[str, str], Path],
    name: str,
    settings: str,
    make: Callable[..., Backend],
) -> None:
    """Match PEFT for each setting that says where an adapter is, of which rank and how strong, tied head or not."""
    adapter = make_with(name, settings)
    backend = make(checkpoints[name], dtype="float32", max_loras=1)
    ours = run_adapted(backend, backend.load_adapter(adapter))
    check(name, "float32", differences(ours, run_peft(checkpoints[name], adapter, "float32")))


@cache
def run_reference_adapted(checkpoint: Path, adapter: Path, numbers: str) -> torch.Tensor:
    """Return the reference's logits, which are those for every instruction set."""
    backend = make_backend(checkpoint, max_loras=1, **FORMATS[numbers])
    return run_adapted(backend, backend.load_adapter(adapter))


@needs_kernels
@pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it
@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4-bytes"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_instruction_sets_and_formats(
    checkpoints: dict[str, Path], adapters: dict[str, Path], path: CpuPath, numbers: str
) -> None:
    """Match the reference over quantized weights too, on every instruction set."""
    checkpoint, adapter = checkpoints["llama-rope3"], adapters["llama-rope3"]
    backend = make_cpu_backend(checkpoint, kernels=kernels_of(path), max_loras=1, **CPU_FORMATS[numbers])
    ours = run_adapted(backend, backend.load_adapter(adapter))
    theirs = run_reference_adapted(checkpoint, adapter, numbers.removesuffix("-bytes"))
    if numbers in ("bfloat16", "int8") and path.rounds_activations:  # as far from the reference as torch is
        check("llama-rope3", "bfloat16", differences(ours, theirs), adapted=True)
        return
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    print(path, numbers, difference)
    # a key or value that is rounded the other way changes what follows, by more where weights are larger
    assert difference <= CLOSE[numbers] * (3 if numbers == "bfloat16" else 1)
