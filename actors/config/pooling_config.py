"""How a server makes vectors and scores of a model's outputs, as its checkpoint says.

Resolved by `web/cli/settings.py` from the checkpoint's files (`actors/shared/pooling_files.py`), sent to engines with
their configuration.
"""

from __future__ import annotations

from enum import StrEnum

import attrs


class Task(StrEnum):
    """What a server computes."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class PoolingType(StrEnum):
    """Which positions of a prompt make its vector."""

    LAST = "last"
    """The last one, which is always computed, however much of the prompt is cached."""
    MEAN = "mean"
    """All of them, so that none may be read from the cache."""


@attrs.frozen(kw_only=True)
class PoolingConfig:
    type: PoolingType = PoolingType.LAST
    normalizes: bool = True
    """Whether vectors are scaled to length 1."""
    score_token_ids: tuple[int, ...] = ()
    """For scores: the tokens that answer "no" and "yes". Empty: vectors."""
    is_classifier: bool = False
    """For scores: the checkpoint has a `score.weight`, which makes the logit of a score of a vector."""

    @property
    def reads_cache(self) -> bool:
        return self.type is PoolingType.LAST


LAST_TOKEN = PoolingConfig()
