"""Tokens that are banned in bfloat16, compared with rules that are applied to a copy in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quipu.kernels.logit_processors import LogitProcessor, Processing, edited
from quipu.kernels.step_types import LogitRules
from quipu.kernels.vllm_runner.banned_tokens import banned

VOCAB_SIZE = 200
BUDGET = {"reasoning_opening_ids": (0,), "reasoning_closing_ids": (1,), "prompt_opens_reasoning": True}


def drawn_logits(seed: int = 0) -> torch.Tensor:
    """Return three rows; a batch's rows 4 and 7 have the last and the first of them."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(3, VOCAB_SIZE, generator=made).to(torch.bfloat16)


def processing_of(*rules: LogitRules, outputs: Sequence[int] = (5, 6), **masks: Any) -> Processing:
    return Processing([4, 7][: len(rules)], [LogitProcessor(one, [9], outputs) for one in rules], **masks)


def as_banned(processing: Processing, logits_PV: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """Return the logits of rows 4 and 7 once tokens are banned, None if none is; check that they are restored."""
    bits_PV = logits_PV.view(torch.uint16).numpy()
    raw_PV = bits_PV.copy()
    with banned(processing, {4: 2, 7: 0}, bits_PV) as is_done:
        found: npt.NDArray[np.float32] = logits_PV[[2, 0]].float().numpy()
        assert is_done or (bits_PV == raw_PV).all()
    assert (bits_PV == raw_PV).all()
    return found if is_done else None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"min_tokens": 3, "held_back_token_ids": (2, 199)}, {"min_tokens": 2, "held_back_token_ids": (3,)}),
        ({"bad_words": ((7,), (6, 8), (5, 9))}, {"bad_words": ((8,),), "min_tokens": 9, "held_back_token_ids": (8, 1)}),
        ({"thinking_budget": 50, **BUDGET}, {"bad_words": ((4, 4),)}),
    ],
)
def test_bans_are_those_of_the_rules(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Rows are what they would be in float32, those that nothing is banned in now, too."""
    logits_PV = drawn_logits()
    wanted_MV = logits_PV[[2, 0]].float().numpy()
    found_MV = as_banned(processing_of(LogitRules(**first), LogitRules(**second)), logits_PV)
    with edited(processing_of(LogitRules(**first), LogitRules(**second)), [4, 7], wanted_MV):
        assert found_MV is not None and (found_MV == wanted_MV).all()


@pytest.mark.parametrize(
    "rules",
    [
        {"bias": {4: -1.0}},
        {"allowed_token_ids": (4, 5)},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 2.0},
        {"thinking_budget": 1, **BUDGET},
    ],
)
def test_other_rules_are_left_alone(rules: dict[str, Any]) -> None:
    """Nothing is banned in any row if the rules of one do more."""
    ban = LogitRules(bad_words=((7,),))
    assert as_banned(processing_of(ban, LogitRules(**rules)), drawn_logits()) is None


def test_masks_are_left_alone() -> None:
    ban = LogitRules(bad_words=((7,),))
    assert as_banned(processing_of(ban, ban, masked_rows=[7], masks=lambda: [bytes(25)]), drawn_logits()) is None


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_broken_logits_are_not_hidden(value: float) -> None:
    """A row whose banned token has NaN or +inf is left as it is, so that it fails."""
    logits_PV = drawn_logits()
    logits_PV[0, 7] = value
    ban = LogitRules(bad_words=((7,),))
    assert as_banned(processing_of(ban, ban), logits_PV) is None
    logits_PV[0, 7] = -float("inf")
    assert as_banned(processing_of(ban, ban), logits_PV) is not None


def test_rows_with_few_tokens() -> None:
    """Whether a ban leaves any token is not decided by a few of them."""
    logits_PV = drawn_logits()
    logits_PV[0, :100] = -float("inf")
    ban = LogitRules(bad_words=((7,),))
    assert as_banned(processing_of(ban, ban), logits_PV) is None
