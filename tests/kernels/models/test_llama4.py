"""What only Llama 4 has: queries multiplied by position, and experts that are chosen by scores, not by weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quipu.kernels.models.config_parts import Temperature
from quipu.kernels.models.rope import make_factor_table, position_factors
from quipu.kernels.ops import Experts
from quipu.kernels.reference import experts
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.oracles import check, differences, run, run_transformers


def test_factors_of_positions() -> None:
    """Factors are 1 up to the first floor, then grow with the logarithm of how many there were; sines are 0."""
    temperature = Temperature(floor=4, scale=0.5, first=1)
    factor_P = position_factors(temperature, 9)
    assert factor_P is not None
    table = make_factor_table(factor_P, 6)
    grown = 1 + 0.5 * torch.tensor([1.0, 2.0, 3.0]).log()
    expected = torch.cat([grown[:1].expand(3), grown[1:2].expand(4), grown[2:].expand(2)])
    torch.testing.assert_close(table.cos_PR, expected.unsqueeze(1).expand(-1, 3))
    assert not table.sin_PR.any()
    assert position_factors(temperature, 3) is None


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return a checkpoint whose routers have scores so large that the sigmoids of several are 1."""
    folder = Path(shutil.copytree(checkpoints["llama4-plain"], tmp_path_factory.mktemp("models") / "sure"))
    tensors = load_file(folder / "model.safetensors")
    routers = [name for name in tensors if name.endswith("router.weight")]
    save_file(tensors | {name: 60 * tensors[name] for name in routers}, folder / "model.safetensors")
    assert len(routers) == 1
    return folder


@pytest.mark.parametrize("make", [make_backend, pytest.param(make_cpu_backend, marks=needs_kernels)])
def test_equal_weights(sure: Path, make: Callable[..., Backend]) -> None:
    """Choose the expert with the largest score, as transformers does, where several have the same weight."""
    check("llama4-plain", "float32", differences(run(make(sure, dtype="float32")), run_transformers(sure, "float32")))


@pytest.mark.parametrize("name", ["llama4", "llama4-plain"])
def test_with_the_same_experts(checkpoints: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts that float32 chooses, bfloat16 is as near as in dense models: what is larger without them is of
    experts whose scores are nearly equal."""
    choose, chosen = experts._choose, list[torch.Tensor]()

    def record(router_NX: torch.Tensor, of: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        weight_NT, chosen_NT = choose(router_NX, of)
        chosen.append(chosen_NT)
        return weight_NT, chosen_NT

    def replay(router_NX: torch.Tensor, of: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_NT = chosen.pop(0)
        return torch.sigmoid(router_NX.gather(1, chosen_NT)), chosen_NT

    monkeypatch.setattr(experts, "_choose", record)
    check(
        name,
        "float32",
        differences(run(make_backend(checkpoints[name])), run_transformers(checkpoints[name], "float32")),
    )
    monkeypatch.setattr(experts, "_choose", replay)
    found = run(make_backend(checkpoints[name], dtype="bfloat16"))
    assert not chosen
    check("llama", "bfloat16", differences(found, run_transformers(checkpoints[name], "float32")))


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized(checkpoints: dict[str, Path], quantization: str) -> None:
    """The CPU kernels compute what the reference does with the same codes, those of stacked experts included."""
    settings = {"dtype": "float32", "quantization": quantization}
    backend = make_cpu_backend(checkpoints["llama4"], **settings)
    assert backend.capabilities.weights.startswith(quantization)
    found = differences(run(backend), run(make_backend(checkpoints["llama4"], **settings)))
    assert found.mean < 0.05  # where activations are rounded, another expert is chosen now and then
