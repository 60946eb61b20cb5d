"""Steps that decode many sequences with eight key/value heads, whose parts of a block are one long run of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.kernels import family_configs
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, make_checkpoint
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = needs_kernels

NUM_KV_HEADS, NUM_BLOCKS = 8, 19
LENGTHS = (7, 17, 33, 60, 100, 130, 257, 300)
BLOCKS = scattered_blocks(NUM_BLOCKS * len(LENGTHS), seed=3, num_blocks=NUM_BLOCKS * len(LENGTHS) + 1)


@pytest.fixture(scope="module", params=[1, 2, 4])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with so many query heads for each of its keys."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=NUM_KV_HEADS * request.param, num_key_value_heads=NUM_KV_HEADS, head_dim=64,
        max_position_embeddings=1024,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_configs.CONFIGS, "many-heads", lambda: config)
        return make_checkpoint(tmp_path_factory.mktemp("many"), "many-heads")


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("numbers", ["bfloat16", "int8-kv"])
def test_bits(checkpoint: Path, numbers: str, num_threads: int) -> None:
    """Give tokens that are decoded together the logits that they have in prompts."""
    backend = make_cpu_backend(checkpoint, **CPU_FORMATS[numbers], num_blocks=len(BLOCKS) + 1)
    backend.num_threads = num_threads
    whole, begun, last = [
        [
            {
                "slot": slot,
                "token_ids": prompt(length, seed=slot)[start : length + end],
                "position": start if start >= 0 else length + start,
                "blocks": BLOCKS[NUM_BLOCKS * slot :][:NUM_BLOCKS],
            }
            for slot, length in enumerate(LENGTHS)
        ]
        for start, end in ((0, 0), (0, -1), (-1, 0))
    ]
    expected = torch.cat([backend.logits(make_batch(row), [len(row["token_ids"]) - 1]) for row in whole])
    backend.cache.fill(float("nan"))
    backend.logits(make_batch(*begun), [])
    assert torch.equal(backend.logits(make_batch(*last), list(range(len(last)))), expected)
