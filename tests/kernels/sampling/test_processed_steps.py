"""Rules and masks in a step of each backend: they change what is sampled, but neither logprobs nor kept state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from quipu.kernels.batch import Drawn, Scoring, StepBatch
from quipu.kernels.logit_processors import LogitProcessor, Processing
from quipu.kernels.step_types import LogitRules
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.family_configs import VOCAB_SIZE
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.step_batches import make_batch, prompt

MAKERS: list[Any] = [
    pytest.param(make_backend, id="reference"),
    pytest.param(make_cpu_backend, id="cpu", marks=needs_kernels),
]
PREFERRED, FORCED, MASKED = 200, 201, {33, 70, 319}


def batch_of(*, processing: Processing | None, start: int = 0, carried: bool = False) -> StepBatch:
    """Make a batch of four sequences of 20 tokens, or of their next tokens; all rows are scored."""
    rows = [
        {
            "token_ids": [0] if carried else prompt(20, seed=row),
            "position": start,
            "blocks": [2 * row + 1, 2 * row + 2],
            "carried": carried,
            "output_position": int(carried),
            **({"temperature": 0.9, "seed": 5} if row in (0, 3) else {}),
        }
        for row in range(4)
    ]
    scoring = Scoring([0, 1, 2, 3], [4, 4, 4, 4], [], [], [])
    return attrs.evolve(make_batch(*rows), scoring=scoring, processing=processing)


def processing() -> Processing:
    bits = np.zeros(VOCAB_SIZE, dtype=np.uint8)
    bits[list(MASKED)] = 1
    words = np.packbits(bits, bitorder="little").view("<i4")
    assert len(words) == -(-VOCAB_SIZE // 32)
    rules = LogitRules(bias={PREFERRED: 100.0}, frequency_penalty=2.0)
    budget = LogitRules(
        thinking_budget=0, reasoning_opening_ids=(1,), reasoning_closing_ids=(FORCED,), prompt_opens_reasoning=True
    )
    processors = [LogitProcessor(rules, prompt(20, seed=row), []) for row, rules in ((1, rules), (3, budget))]
    return Processing([1, 3], processors, [2, 3], lambda: [words.tobytes()] * 2)


@pytest.mark.parametrize("make", MAKERS)
def test_rules_and_masks_in_a_step(make: Callable[..., Any], checkpoints: dict[str, Path]) -> None:
    """Apply rules and masks to their rows only; all logprobs keep the bits that they have without rules."""
    plain: Drawn = make(checkpoints["llama"]).step(batch_of(processing=None))
    backend = make(checkpoints["llama"])
    drawn = backend.step(batch_of(processing=processing()))
    first, second, third, fourth = drawn.token_ids
    assert (first, second) == (plain.token_ids[0], PREFERRED) and third in MASKED and fourth == FORCED
    assert plain.scores is not None and drawn.scores is not None
    assert drawn.scores.top_ids == plain.scores.top_ids and drawn.scores.top_logprobs == plain.scores.top_logprobs
    assert drawn.scores.logprobs[0] == plain.scores.logprobs[0]
    assert drawn.scores.logprobs[1] < plain.scores.logprobs[1]
    assert -np.inf < drawn.scores.logprobs[3] < 0
    # the next step is fed the sampled tokens
    after = backend.step(batch_of(processing=None, start=20, carried=True))
    fed = attrs.evolve(
        batch_of(processing=None, start=20, carried=True), carried=[False] * 4, token_ids=drawn.token_ids
    )
    again = make(checkpoints["llama"])
    again.step(batch_of(processing=None))
    assert again.step(fed) == after


@pytest.mark.parametrize("make", MAKERS)
def test_mask_without_a_token_fails_only_its_row(make: Callable[..., Any], checkpoints: dict[str, Path]) -> None:
    """Report the row with the mask, and draw for the others as ever."""
    processing = Processing([], [], [2], lambda: [bytes(VOCAB_SIZE // 8)])
    drawn = make(checkpoints["llama"]).step(batch_of(processing=processing))
    assert list(processing.failures) == [2]
    plain = make(checkpoints["llama"]).step(batch_of(processing=None))
    assert [drawn.token_ids[row] for row in (0, 1, 3)] == [plain.token_ids[row] for row in (0, 1, 3)]
