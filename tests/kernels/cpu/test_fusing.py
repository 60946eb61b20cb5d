"""Fused operations: fewer of them, and the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.checkpoints.weights import Weights
from quipu.kernels.cpu import program, recording
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.models.config import DecoderConfig
from quipu.kernels.models.decoder_model import Decoder
from quipu.kernels.models.families import FAMILIES
from quipu.kernels.ops import Ops
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import THOROUGH, make_backend
from tests.kernels.oracles import run
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = needs_kernels


def logits_of(backend: CpuBackend) -> torch.Tensor:
    """Return logits of a prefill of many and few rows, and of a decode of several."""
    tables = scattered_blocks(40, seed=3)
    rows = [
        {"token_ids": prompt(n, seed=n), "position": 0, "blocks": tables[i * 8 :][:8]} for i, n in enumerate((99, 5))
    ]
    many = backend.logits(make_batch(*rows), [0, 98, 103])
    decodes: list[dict[str, Any]] = [
        {"token_ids": [7], "position": 99, "blocks": tables[:8]},
        {"token_ids": [9], "position": 5, "blocks": tables[8:16]},
    ]
    return torch.cat([many, backend.logits(make_batch(*decodes), [0, 1])])


@pytest.mark.parametrize(("name", "num_threads"), [*((name, 2) for name in CONFIGS), *((name, 1) for name in THOROUGH)])
def test_fused_bits_equal_unfused(
    checkpoints: dict[str, Path], name: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the same bits with fused operations as with separate ones."""
    fused = make_cpu_backend(checkpoints[name], num_threads=num_threads, dtype="bfloat16")
    ours = logits_of(fused)
    monkeypatch.setattr(recording, "fuse", list)
    plain = make_cpu_backend(checkpoints[name], num_threads=num_threads, dtype="bfloat16")
    assert len(fused._program.draw) < len(plain._program.draw)
    assert torch.equal(ours, logits_of(plain))


def test_operations_per_layer(checkpoints: dict[str, Path]) -> None:
    """Run five operations per layer: norms, ropes, the cache write, the activation and both additions are fused."""
    for name in ("qwen3-tied", "llama"):
        kinds = Counter(op.kind for op in make_cpu_backend(checkpoints[name])._program.draw)
        layers = 2
        assert kinds == {
            program.EMBED: 1,
            program.GATHER: 2,
            program.LINEAR: 4 * layers + 1,
            program.ATTEND: layers,
        }


class WholeRowOps:
    """`Ops` that norm queries or keys over all heads together, as OLMo 2 does, where the model norms each head."""

    def __init__(self, ops: Ops, which: tuple[int, ...]) -> None:
        self._ops = ops
        self._which = which

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() != 3 or x.shape[1] not in self._which:
            return self._ops.rms_norm(x, weight, eps)
        return self._ops.rms_norm(x.flatten(1), weight.repeat(x.shape[1]), eps).view(x.shape)


class WholeRowModel:
    """A Qwen3 model that uses `WholeRowOps`."""

    def __init__(self, model: Decoder, which: tuple[int, ...]) -> None:
        self._model = model
        self._which = which

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.forward(token_ids_N, WholeRowOps(ops, self._which))

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.logits(x_ND, ops)


@pytest.mark.parametrize("which", [(4,), (2,), (4, 2)], ids=["queries", "keys", "both"])
def test_norms_of_whole_rows(
    checkpoints: dict[str, Path], which: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do not fuse a norm of whole rows into attention, which norms heads; match the reference."""

    def build(config: DecoderConfig, weights: Weights, num_positions: int) -> WholeRowModel:
        return WholeRowModel(Decoder(config, weights, num_positions), which)

    per_head = run(make_cpu_backend(checkpoints["qwen3-tied"], dtype="float32"))
    monkeypatch.setitem(FAMILIES, "Qwen3ForCausalLM", attrs.evolve(FAMILIES["Qwen3ForCausalLM"], build=build))
    ours = run(make_cpu_backend(checkpoints["qwen3-tied"], dtype="float32"))
    theirs = run(make_backend(checkpoints["qwen3-tied"], dtype="float32"))
    assert ((ours - theirs).abs().max() / theirs.std()).item() <= 2e-5
    assert ((per_head - theirs).abs().max() / theirs.std()).item() > 0.1, "the test cannot tell the two norms apart"


class BiasedOps:
    """`Ops` in which every product without a bias has one, as no family's MLP does."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        width = weight_OI.shape[0]
        bias_O = torch.linspace(-2, 1, width) if bias_O is None else bias_O
        return self._ops.linear(x_NI, weight_OI, bias_O)


class BiasedModel:
    """A Qwen3 model that uses `BiasedOps`."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.forward(token_ids_N, BiasedOps(ops))

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self._model.logits(x_ND, ops)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "activations": "int8"},
        {"dtype": "bfloat16", "quantization": "int4", "activations": "float"},
    ],
    ids=lambda options: "-".join(options.values()),
)
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-odd"])
def test_biases_of_gate_and_up(
    checkpoints: dict[str, Path], name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation that is fused sees each half's own bias, whether panels divide a half or not."""

    def build(config: DecoderConfig, weights: Weights, num_positions: int) -> BiasedModel:
        return BiasedModel(Decoder(config, weights, num_positions))

    without = logits_of(make_cpu_backend(checkpoints[name], **options))
    monkeypatch.setitem(FAMILIES, "Qwen3ForCausalLM", attrs.evolve(FAMILIES["Qwen3ForCausalLM"], build=build))
    fused = logits_of(make_cpu_backend(checkpoints[name], **options))
    monkeypatch.setattr(recording, "fuse", list)
    assert torch.equal(fused, logits_of(make_cpu_backend(checkpoints[name], **options)))
    assert not torch.equal(fused, without)
