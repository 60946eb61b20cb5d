"""From rows of logits to logprobs: of one token each, and of the likeliest beside it. The oracle of any faster way.

A backend calls `score` with the raw logits, before temperature and filters.

What must always hold: what is said of a row depends on that row alone, to the bit. So rows go through one by one, and
no operation sees a shape that depends on how many there are. Of equal logits the lower token id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import Scores


def score(logits_MV: torch.Tensor, target_ids: Sequence[int], num_top: Sequence[int]) -> Scores:
    """Score one token a row of float32 logits, and name the `num_top` likeliest.

    Raises ArithmeticError where a row holds NaN or has no finite maximum.
    """
    scores = Scores.empty()
    for logits_V, target_id, count in zip(logits_MV, target_ids, num_top, strict=True):
        logprobs_V = torch.log_softmax(logits_V, -1)
        logprob = float(logprobs_V[target_id])
        if logprob != logprob:
            raise not_numbers(target_id)
        top_ids = likeliest(logits_V, count)
        scores.token_ids.append(target_id)
        scores.logprobs.append(logprob)
        scores.ranks.append(rank(logits_V, target_id))
        scores.top_ids.append(top_ids)
        scores.top_logprobs.append(logprobs_V[top_ids].tolist())
    return scores


def not_numbers(target_id: int) -> ArithmeticError:
    """What is raised where a row cannot be scored."""
    return ArithmeticError(f"logits that should score token {target_id} are not numbers")


def rank(logits_V: torch.Tensor, token_id: int) -> int:
    """Place of a token in the order of the row, from 1."""
    logit = logits_V[token_id]
    num_above = int((logits_V > logit).sum())
    return 1 + num_above + int((logits_V[:token_id] == logit).sum())


def likeliest(logits_V: torch.Tensor, count: int) -> list[int]:
    """Ids of the `count` largest logits, in order."""
    if count <= 0:
        return []
    count = min(count, len(logits_V))
    # topk chooses among equals as it likes: everything from its last value on is sorted again, ids ascending
    threshold = torch.topk(logits_V, count).values[-1]
    ids = (logits_V >= threshold).nonzero()[:, 0]
    order = torch.sort(logits_V[ids], descending=True, stable=True).indices[:count]
    return [int(token_id) for token_id in ids[order]]
