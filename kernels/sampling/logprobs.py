"""Logprobs of one token per row of logits, and of the most likely tokens. The oracle of faster implementations.

A backend calls `add_scores` with the raw logits, before temperature and filters.

What must always hold: the bits of a row's scores depend on that row alone. So rows are processed one by one, and no
operation has a shape that depends on their number. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from ..batch import Drawn, Scoring
from ..step_types import Scores

Rows = tuple[torch.Tensor, Sequence[int]]
"""Logits, and which of their rows are meant."""


def add_scores(
    drawn: Drawn,
    scoring: Scoring,
    rows: Rows,
    head: Callable[[list[int]], Rows],
    score_rows: Callable[[torch.Tensor, Sequence[int], list[int], list[int]], Scores],
    *,
    at_once: int,
) -> Drawn:
    """Add the requested scores to what was drawn, from the logits of `drawn.rows`.

    `head` computes the logits of tokens of the prompt, `at_once` of them: those of a whole prompt may be larger than
    the model. `score_rows` scores rows of logits like `score`.
    """
    scoring = scoring.without(drawn.broken_rows)
    logits_MV, places = rows
    at = {row: index for index, row in enumerate(drawn.rows)}
    chosen = [at[row] for row in scoring.drawn_rows]
    token_ids = [drawn.token_ids[index] for index in chosen]
    scores = score_rows(logits_MV, [places[index] for index in chosen], token_ids, scoring.drawn_num_top)
    prompt_scores = Scores.empty()
    for start in range(0, len(scoring.prompt_tokens), at_once):
        some = slice(start, start + at_once)
        target_ids, num_top = scoring.prompt_target_ids[some], scoring.prompt_num_top[some]
        prompt_scores.extend(score_rows(*head(scoring.prompt_tokens[some]), target_ids, num_top))
    return attrs.evolve(drawn, scores=scores, prompt_scores=prompt_scores)


def score_rows(logits_MV: torch.Tensor, rows: Sequence[int], target_ids: list[int], num_top: list[int]) -> Scores:
    """Score one token for each of these rows like `score`."""
    return score(logits_MV[list(rows)], target_ids, num_top)


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
