"""`TransformersBackend.step`: draws, scores, broken rows, copies and blocks that are moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.batch import Drawn, Scoring
from quipu.kernels.sampling.oracle import draw
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.kernels.transformers_runner.foreign_families import CONFIGS, make_model, make_transformers_backend

BLOCKS = scattered_blocks(60, seed=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "cohere2", CONFIGS["cohere2"]())


def row(index: int, **changes: Any) -> dict[str, Any]:
    """Return a row of sequence `index`, with its own prompt, blocks and seed, sampled at temperature 1."""
    return {
        "slot": index,
        "token_ids": prompt(20 + index, seed=index),
        "position": 0,
        "blocks": BLOCKS[index * 10 : index * 10 + 10],
        "temperature": 1.0,
        "seed": 1000 + index,
        **changes,
    }


def test_draws_and_scores(folder: Path) -> None:
    """Tokens are those that our sampler draws from the logits, and logprobs are theirs, also of a prompt's tokens."""
    backend = make_transformers_backend(folder)
    batch = make_batch(row(0), row(1, samples=False), row(2))
    scoring = Scoring([0, 2], [2, 0], list(range(20, 40)), batch.token_ids[21:41], [0] * 19 + [3])
    drawn = backend.step(attrs.evolve(batch, scoring=scoring))
    logits_MV = backend.logits(batch, [19, 62])
    assert drawn.rows == [0, 2] and drawn.token_ids == draw(batch, [0, 2], logits_MV.numpy())
    expected = torch.log_softmax(backend.logits(batch, list(range(20, 40))), -1)
    assert drawn.scores is not None and drawn.prompt_scores is not None
    chosen = torch.log_softmax(logits_MV, -1)[[0, 1], drawn.token_ids]
    assert torch.allclose(torch.tensor(drawn.scores.logprobs), chosen, atol=1e-5)
    found = torch.tensor(drawn.prompt_scores.logprobs)
    assert torch.allclose(found, expected[range(20), drawn.prompt_scores.token_ids], atol=1e-5)
    assert drawn.prompt_scores.top_ids[-1] == expected[-1].topk(3).indices.tolist()
    assert backend.step(make_batch(row(0, samples=False))) == Drawn(rows=[], token_ids=[])


def test_carried_tokens(folder: Path) -> None:
    """A row may be fed what its slot drew last; a slot that drew nothing is named."""
    backend = make_transformers_backend(folder)
    first = backend.step(make_batch(row(0), row(1))).token_ids
    carried = [row(at, token_ids=[0], carried=True, position=20 + at, output_position=1) for at in (1, 0)]
    fed = [row(at, token_ids=[first[at]], position=20 + at, output_position=1) for at in (1, 0)]
    assert backend.step(make_batch(*carried)).token_ids == backend.step(make_batch(*fed)).token_ids
    with pytest.raises(ValueError, match="slot 5"):
        backend.step(make_batch(row(0, slot=5, token_ids=[0], carried=True, position=20)))


def test_broken_rows(folder: Path) -> None:
    """A row whose keys hold NaN is reported; rows that are read beside it, and padded with its slots, are as ever."""
    backend = make_transformers_backend(folder)
    backend.step(make_batch(row(0), row(2)))
    later = [row(at, token_ids=[7], position=20 + at, output_position=1) for at in (0, 2)]
    expected = backend.step(make_batch(*later))
    broken = row(1, token_ids=[7], position=90)
    drawn = backend.step(make_batch(later[0], broken, later[1]))
    assert drawn.broken_rows == [1] and [drawn.token_ids[at] for at in (0, 2)] == expected.token_ids


def test_blocks_move(folder: Path) -> None:
    """A prompt goes on from blocks that were copied in the pass, and from another backend's by way of the host."""
    backend, other = (make_transformers_backend(folder) for _ in range(2))
    tokens, blocks = prompt(70, seed=8), BLOCKS[:5]
    whole = backend.logits(make_batch({"token_ids": tokens, "position": 0, "blocks": blocks}), [68, 69])
    host = backend.allocate_on_host(4)
    backend.read_blocks(blocks[:4], host)
    other.write_blocks(BLOCKS[20:24], host)
    rest = {"token_ids": tokens[64:], "position": 64, "blocks": BLOCKS[20:25]}
    assert torch.allclose(other.logits(make_batch(rest), [4, 5]), whole, atol=1e-5)
    last = {"token_ids": tokens[63:], "position": 63, "blocks": [*blocks[:3], *BLOCKS[30:32]]}
    copied = attrs.evolve(make_batch(last), copies=[(blocks[3], BLOCKS[30])])
    assert torch.allclose(backend.logits(copied, [5, 6]), whole, atol=1e-5)


def test_bfloat16(folder: Path) -> None:
    """Weights and cache are in the data type that is asked for, and so is what `/server_info` shows."""
    backend = make_transformers_backend(folder, dtype="bfloat16")
    shown = backend.capabilities
    assert (shown.dtype, shown.kv_cache_dtype, shown.weights) == ("bfloat16", "bfloat16", "bfloat16")
    assert shown.library is not None and shown.library.startswith("transformers 5.") and not shown.invariant
    assert len(backend.step(make_batch(row(0), row(1))).token_ids) == 2
    assert backend.memory_plan.block_bytes == 2 * 2 * 2 * 16 * 16 * 2  # layers, k and v, heads, slots, elements, bytes


def test_memory(folder: Path) -> None:
    """Without a number of blocks the largest pass is measured, and there is room for sixteen contexts."""
    plan = make_transformers_backend(folder, num_blocks=None).memory_plan
    assert plan.num_blocks == 1 + 16 * 512 // 16 and plan.workspace_bytes is not None
    with pytest.raises(ValueError, match="max_model_len"):
        make_transformers_backend(folder, num_blocks=9)
    assert make_transformers_backend(folder, num_blocks=9, may_shorten=True).memory_plan.max_model_len == 8 * 16
