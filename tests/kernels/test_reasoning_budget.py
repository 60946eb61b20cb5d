"""What a thinking budget forces after any output, compared with a direct implementation of its definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.reasoning_budget import ReasoningBudget

Ids = Sequence[int]
OPEN, CLOSE = (8,), (9,)


def find(outputs: Ids, ids: Ids, start: int) -> int | None:
    """Return where the first `ids` at or after `start` end."""
    for end in range(start + len(ids), len(outputs) + 1):
        if outputs[end - len(ids) : end] == ids:
            return end
    return None


def expected(num_tokens: int, opening: Ids, closing: Ids, outputs: Ids, *, prompt_opens: bool) -> int | None:
    """Return the forced token from the definition, without any state."""
    opened = 0 if prompt_opens else find(outputs, opening, 0)
    if opened is None or find(outputs, closing, opened) is not None:
        return None
    if len(outputs) - opened < num_tokens:
        return None
    inside = outputs[opened:]
    matched = max(size for size in range(len(closing)) if inside[len(inside) - size :] == closing[:size])
    return closing[matched]


delimiters = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@given(
    num_tokens=st.integers(0, 8),
    opening=delimiters,
    closing=delimiters,
    outputs=st.lists(st.integers(0, 2), max_size=24).map(tuple),
    prompt_opens=st.booleans(),
)
def test_state_matches_the_definition(
    num_tokens: int, opening: Ids, closing: Ids, outputs: Ids, *, prompt_opens: bool
) -> None:
    """Force after every prefix what the definition demands, also if delimiters overlap themselves or each other."""
    budget = ReasoningBudget(num_tokens, opening, closing, prompt_opens=prompt_opens)
    for length in range(len(outputs) + 1):
        told = expected(num_tokens, opening, closing, outputs[:length], prompt_opens=prompt_opens)
        assert budget.forced_token_id == told
        if length < len(outputs):
            budget.add_output(outputs[length])


def drawn_with(budget: ReasoningBudget, wanted: Ids) -> list[int]:
    """Return the outputs of a model that draws `wanted`, except where a token is forced."""
    outputs = []
    for token_id in wanted:
        forced = budget.forced_token_id
        outputs.append(token_id if forced is None else forced)
        budget.add_output(outputs[-1])
    return outputs


@pytest.mark.parametrize(
    ("num_tokens", "prompt_opens", "wanted", "drawn"),
    [
        (0, True, [1, 2, 3], [9, 2, 3]),
        (2, True, [1, 2, 3, 4, 5], [1, 2, 9, 4, 5]),
        (2, True, [1, 9, 3, 4, 5], [1, 9, 3, 4, 5]),  # it has ended by itself
        (2, True, [9, 8, 3, 4, 5], [9, 8, 3, 4, 5]),  # reasoning is limited once
        (2, False, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),  # there is no reasoning
        (0, False, [1, 8, 3, 4, 5], [1, 8, 9, 4, 5]),
        (1, False, [1, 8, 3, 4, 5], [1, 8, 3, 9, 5]),  # the opening delimiter does not count
        (2, False, [1, 8, 3, 4, 5], [1, 8, 3, 4, 9]),
        (3, False, [8, 8, 8, 8, 5], [8, 8, 8, 8, 9]),
        (1, False, [9, 8, 3, 4, 5], [9, 8, 3, 9, 5]),  # nothing is closed before it is opened
        (9, True, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),  # the output ends earlier
    ],
)
def test_single_token_delimiters(num_tokens: int, prompt_opens: bool, wanted: list[int], drawn: list[int]) -> None:
    """Close reasoning once the budget is used up, then force nothing more."""
    assert drawn_with(ReasoningBudget(num_tokens, OPEN, CLOSE, prompt_opens=prompt_opens), wanted) == drawn


@pytest.mark.parametrize(
    ("wanted", "drawn"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 8, 6, 7]),
        ([1, 9, 3, 4, 5, 6, 7], [1, 9, 9, 8, 5, 6, 7]),  # begun by the model, completed by force
        ([9, 9, 3, 4, 5, 6, 7], [9, 9, 8, 4, 5, 6, 7]),
        ([9, 9, 9, 8, 5, 6, 7], [9, 9, 8, 8, 5, 6, 7]),
    ],
)
def test_longer_closing_delimiter(wanted: list[int], drawn: list[int]) -> None:
    """Force the delimiter's tokens one after the other, continuing what the model has begun."""
    assert drawn_with(ReasoningBudget(2, OPEN, (9, 9, 8), prompt_opens=True), wanted) == drawn
