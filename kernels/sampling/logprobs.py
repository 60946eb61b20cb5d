"""Logprobs of one token per row of logits, and of the most likely tokens. The oracle of faster implementations.

A backend calls `score` with the raw logits, before temperature and filters.

What must always hold: the bits of a row's scores depend on that row alone. So rows are processed one by one, and no
operation has a shape that depends on their number. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..step_types import Scores


def score(logits_MV: torch.Tensor, target_ids: Sequence[int], num_top: Sequence[int]) -> Scores:
    """Score one token per row of float32 logits, and report the `num_top` most likely tokens.

    Raises ArithmeticError if a row holds NaN or has no finite maximum.
    """
    scores = Scores.empty()
    for logits_V, target_id, count in zip(logits_MV, target_ids, num_top, strict=True):
        logprobs_V = torch.log_softmax(logits_V, -1)
        logprob = float(logprobs_V[target_id])
        if logprob != logprob:
            raise unscorable(target_id)
        top_ids = likeliest(logits_V, count)
        scores.token_ids.append(target_id)
        scores.logprobs.append(logprob)
        scores.ranks.append(rank(logits_V, target_id))
        scores.top_ids.append(top_ids)
        scores.top_logprobs.append(logprobs_V[top_ids].tolist())
    return scores


def unscorable(target_id: int) -> ArithmeticError:
    """Return the error for a row that cannot be scored."""
    return ArithmeticError(f"cannot score token {target_id}: its logits hold NaN or have no finite maximum")


def rank(logits_V: torch.Tensor, token_id: int) -> int:
    """Return the rank of a token in its row, from 1."""
    logit = logits_V[token_id]
    num_above = int((logits_V > logit).sum())
    return 1 + num_above + int((logits_V[:token_id] == logit).sum())


def likeliest(logits_V: torch.Tensor, count: int) -> list[int]:
    """Return the ids of the `count` largest logits, in order."""
    if count <= 0:
        return []
    count = min(count, len(logits_V))
    # topk breaks ties arbitrarily: everything from its last value on is sorted again, ids ascending
    threshold = torch.topk(logits_V, count).values[-1]
    ids = (logits_V >= threshold).nonzero()[:, 0]
    order = torch.sort(logits_V[ids], descending=True, stable=True).indices[:count]
    return [int(token_id) for token_id in ids[order]]
