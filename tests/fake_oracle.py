"""What a correct engine draws and scores on the fake backend (`quipu.kernels.fake`), computed without one."""

from __future__ import annotations

import numpy as np

from quipu.kernels.fake import Dials, draw
from quipu.kernels.fake_scores import made_up_output, score, slot_value
from quipu.kernels.step_types import Scores


def prompt_scores(token_ids: list[int], num_top: int, dials: Dials | None = None) -> Scores:
    """Return the scores that a correct engine reports for `token_ids`, except for the first of them."""
    values = [slot_value(token_id, position) for position, token_id in enumerate(token_ids)]
    scores = Scores.empty()
    for position in range(1, len(token_ids)):
        scores.extend(score(values[:position], token_ids[position], num_top, (dials or Dials()).drawable))
    return scores


def continuation_scores(token_ids: list[int], count: int, num_top: int, dials: Dials | None = None) -> Scores:
    """Return the scores that a correct engine reports for the greedy `continuation` of `token_ids`."""
    whole = token_ids + continuation(token_ids, count, dials)
    return prompt_scores(whole, num_top, dials).cut(len(token_ids) - 1, len(whole) - 1)


def embedding(
    token_ids: list[int], *, is_mean: bool = False, dimensions: int | None = None, adapter: str = ""
) -> bytes:
    """Return the normalised vector that a correct engine sends for `token_ids`."""
    values = [slot_value(token_id, position, adapter) for position, token_id in enumerate(token_ids)]
    ends = range(1, len(values) + 1) if is_mean else [len(values)]
    vector = np.mean([made_up_output(values[:end]) for end in ends], axis=0)[:dimensions]
    return np.asarray(vector / np.linalg.norm(vector), np.float32).tobytes()


def continuation(
    token_ids: list[int], count: int, dials: Dials | None = None, seed: int = 0, adapter: str = ""
) -> list[int]:
    """Return what a correct engine draws after `token_ids`, whatever its batches, caches and preemptions."""
    dials = dials or Dials()
    values = [slot_value(token_id, position, adapter) for position, token_id in enumerate(token_ids)]
    outputs: list[int] = []
    for position in range(count):
        outputs.append(draw(values, seed, position, dials))
        values.append(slot_value(outputs[-1], len(values), adapter))
    return outputs
