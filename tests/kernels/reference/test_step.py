"""`ReferenceBackend.step`: sampling rows, carried tokens, and independence of other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.kernels.batch import Drawn, Scoring
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.family_configs import VOCAB_SIZE
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

BLOCKS = scattered_blocks(60, seed=20)


def row(index: int, **changes: Any) -> dict[str, Any]:
    """Return a row of sequence `index`, with its own prompt, blocks and seed, sampled at temperature 1."""
    return {
        "slot": index,
        "token_ids": prompt(10 + index, seed=index),
        "position": 0,
        "blocks": BLOCKS[index * 10 : index * 10 + 10],
        "temperature": 1.0,
        "seed": 1000 + index,
        **changes,
    }


def generate(backend: ReferenceBackend, indexes: list[int], *, carried: bool, count: int = 6) -> dict[int, list[int]]:
    """Prefill the sequences together and sample `count` tokens for each, carried on the device or fed by the host."""
    first = backend.step(make_batch(*(row(index) for index in indexes)))
    outputs = {index: [token_id] for index, token_id in zip(indexes, first.token_ids, strict=True)}
    for step in range(1, count):
        rows = [
            row(
                index,
                token_ids=[0 if carried else outputs[index][-1]],
                carried=carried,
                position=10 + index + step - 1,
                output_position=step,
            )
            for index in indexes
        ]
        for index, token_id in zip(indexes, backend.step(make_batch(*rows)).token_ids, strict=True):
            outputs[index].append(token_id)
    return outputs


def test_only_rows_that_sample_draw(checkpoints: dict[str, Path]) -> None:
    """Return the sampling rows in ascending order; return nothing for a pass without any."""
    backend = make_backend(checkpoints["llama"])
    drawn = backend.step(make_batch(row(0, samples=False), row(1), row(2, samples=False), row(3)))
    assert drawn.rows == [1, 3]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in drawn.token_ids)
    assert backend.step(make_batch(row(0, samples=False))) == Drawn(rows=[], token_ids=[])


def test_carried_token_is_the_slots_last(checkpoints: dict[str, Path]) -> None:
    """Sample the same tokens whether carried on the device or fed by the host, alone or in a batch."""
    backend = make_backend(checkpoints["llama"])
    together = generate(backend, [0, 1, 2, 3], carried=True)
    assert generate(backend, [3, 1], carried=False) == {index: together[index] for index in (3, 1)}
    assert generate(backend, [2], carried=True) == {2: together[2]}
    assert len({tuple(tokens) for tokens in together.values()}) == 4


def test_slot_without_drawn_token_cannot_carry(checkpoints: dict[str, Path]) -> None:
    """Raise an error that names the slot instead of feeding token 0 to the model."""
    backend = make_backend(checkpoints["llama"])
    with pytest.raises(ValueError, match="slot 5"):
        backend.step(make_batch(row(0, slot=5, token_ids=[0], carried=True, position=10)))


def test_row_with_nan_logits_affects_no_other(checkpoints: dict[str, Path]) -> None:
    """Report a row that reads unwritten KV and has NaN logits; draw, score and carry the others as ever."""
    backend = make_backend(checkpoints["llama"])
    first = backend.step(make_batch(row(0))).token_ids[0]
    carry = row(0, token_ids=[0], carried=True, position=10, output_position=1)
    batch = attrs.evolve(make_batch(row(1, position=5), carry), scoring=Scoring([0, 1], [2, 2], [], [], []))
    drawn = backend.step(batch)
    assert drawn.broken_rows == [0]
    alone = make_backend(checkpoints["llama"])
    alone.step(make_batch(row(0)))
    fed = row(0, token_ids=[first], position=10, output_position=1)
    expected = alone.step(attrs.evolve(make_batch(fed), scoring=Scoring([0], [2], [], [], [])))
    assert (drawn.token_ids[1], drawn.scores) == (expected.token_ids[0], expected.scores)
    again = row(0, token_ids=[0], carried=True, position=11, output_position=2)
    assert backend.step(make_batch(again)) == alone.step(make_batch(again))
