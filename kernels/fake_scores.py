"""What the fake backend's KV slots hold, and the logprobs that it makes up from them.

Used by `fake.py`, for its passes and for what a correct engine would report.

What must always hold: a score depends on the slots that are read and on the scored token alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .step_types import Scores

MASK = (1 << 61) - 1
_LOGPROB_STEPS = 1 << 20


def slot_value(token_id: int, position: int, adapter: str = "") -> int:
    """Return what a pass writes to the KV slot of `token_id` at `position`, with the weights of an adapter."""
    added = zlib.crc32(adapter.encode()) if adapter else 0
    return (token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1 + added) & MASK


def score(values: list[int], token_id: int, num_top: int, drawable: range) -> Scores:
    """Score `token_id` after KV slots `values`: each id that is `drawable` has a logprob below 0.

    They are not normalised; an id that cannot be drawn is ranked last.
    """
    mixed = hash(tuple(values)) & MASK
    logprobs = {i: -1.0 - (slot_value(i, mixed) % _LOGPROB_STEPS) / _LOGPROB_STEPS for i in drawable}
    order = sorted(drawable, key=lambda i: (-logprobs[i], i))
    return Scores(
        token_ids=[token_id],
        logprobs=[logprobs.get(token_id, -3.0 - (slot_value(token_id, mixed) % _LOGPROB_STEPS) / _LOGPROB_STEPS)],
        ranks=[order.index(token_id) + 1 if token_id in logprobs else len(order) + 1],
        top_ids=[order[:num_top]],
        top_logprobs=[[logprobs[i] for i in order[:num_top]]],
    )


VECTOR_SIZE = 16
"""Elements of a made-up output."""


def made_up_output(values: list[int], columns: Sequence[int] = range(VECTOR_SIZE)) -> npt.NDArray[np.float64]:
    """Return the output of the model after KV slots `values`: numbers between -1 and 1, each a multiple of 2**-20."""
    mixed = hash(tuple(values)) & MASK
    elements = [slot_value(i, mixed) % (2 * _LOGPROB_STEPS) for i in columns]
    return np.array(elements) / _LOGPROB_STEPS - 1.0


def cheap_scores(token_ids: Sequence[int], num_top: Sequence[int]) -> Scores:
    """Make up scores without reading KV: the most likely tokens are the first ids."""
    return Scores(
        token_ids=list(token_ids),
        logprobs=[-0.5] * len(token_ids),
        ranks=[1] * len(token_ids),
        top_ids=[list(range(count)) for count in num_top],
        top_logprobs=[[-0.5 - 0.25 * at for at in range(count)] for count in num_top],
    )
