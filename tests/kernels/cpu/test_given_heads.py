"""Heads of many rows go from their product to attention: the same bits, without a round trip through memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.program import Op
from tests.kernels import family_configs
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, make_checkpoint
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = needs_kernels

BLOCKS = scattered_blocks(60, seed=4)
LENGTHS = (141, 21, 60)  # more rows than kKeptRows, and panels of keys that begin within a block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose heads have more panels of columns than a quantized piece, norms and biases."""
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=160, attention_bias=True, max_position_embeddings=1024,
        use_sliding_window=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_configs.CONFIGS, "wide-heads", lambda: config)
        return make_checkpoint(tmp_path_factory.mktemp("wide"), "wide-heads")


def rows_of(first: bool) -> list[dict[str, Any]]:
    """Return the first five tokens of each sequence, or the others."""
    return [
        {
            "slot": slot,
            "token_ids": prompt(length, seed=slot)[:5] if first else prompt(length, seed=slot)[5:],
            "position": 0 if first else 5,
            "blocks": BLOCKS[20 * slot :][:20],
        }
        for slot, length in enumerate(LENGTHS)
    ]


def results_of(backend: CpuBackend) -> list[torch.Tensor]:
    """Return the logits of some rows, and the bytes of all keys and values."""
    backend.logits(make_batch(*rows_of(True)), [])
    batch = make_batch(*rows_of(False))
    logits = backend.logits(batch, [0, 77, *(end - 1 for end in batch.query_start[1:])])
    return [
        logits,
        *(part.contiguous().view(torch.uint8) for layer in range(len(backend.cache)) for part in backend.cache[layer]),
    ]


def part_heads(backend: CpuBackend) -> int:
    """Let attention take all heads from memory, and return from how many products they were given before."""
    found = backend._program
    given = [op for op in chain(found.keys, found.draw, found.trunk, found.head) if op.joined]
    for op in given:
        op.joined = None
    return len(given) // 2


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("numbers", ["bfloat16", "int8-kv", "int8", "int4", "int8-bytes", "int4-bytes"])
def test_bits(checkpoint: Path, numbers: str, num_threads: int) -> None:
    given, taken = (make_cpu_backend(checkpoint, num_threads=num_threads, **CPU_FORMATS[numbers]) for _ in range(2))
    assert part_heads(taken) == 3 * 2  # of the lists with all layers
    for ours, theirs in zip(results_of(given), results_of(taken), strict=True):
        assert torch.equal(ours, theirs)


@torch.inference_mode()
@pytest.mark.parametrize("numbers", ["bfloat16", "int8", "int8-bytes"])
def test_not_stored(checkpoint: Path, numbers: str) -> None:
    """A product that gives its heads stores none of them for itself, where products are of pairs."""
    backend = make_cpu_backend(checkpoint, **CPU_FORMATS[numbers])
    product = next(op for op in backend._program.keys if op.joined)
    memory = next(tensor for tensor in backend._program.workspace if tensor.data_ptr() == product.y)
    one_pass = backend._pass(make_batch({"token_ids": prompt(150, seed=1), "position": 0, "blocks": BLOCKS[:20]}))
    backend._run(one_pass, [])
    rows = memory[: 150 * product.y_stride].view(150, -1)
    rows.fill_(float("nan"))
    one_pass.run(backend._library, (Op * 1)(product), [])
    assert rows[:, 4 * 160 :].isnan().all().item() == bool(backend._library.quipu_multiplies_pairs())


def test_heads_of_other_shapes(checkpoints: dict[str, Path]) -> None:
    """Products give their heads where their columns are those of one attention; where values are keys, none do."""
    given = {
        name for name in ("qwen3-tied", "gemma2", "deepseek-v2") if part_heads(make_cpu_backend(checkpoints[name]))
    }
    assert given == {"qwen3-tied", "gemma2"}
