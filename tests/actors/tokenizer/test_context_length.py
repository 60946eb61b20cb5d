"""Errors of requests that do not fit the context, worded so that Claude Code recognizes them."""

from __future__ import annotations

import re

import attrs
import pytest

from quipu.actors.messages.outcomes import RequestError
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.tokenizer.context_length import output_budget, prompt_too_long

REQUEST = Encode("r", (), 1, 20, SamplingParams(20), (), False, True, "", "messages", "max_tokens")
ROOM = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
"""After this error, Claude Code asks again for a little less than `context limit - input length` tokens."""
TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
"""After this error, Claude Code compacts the conversation."""


def test_output_that_does_not_fit() -> None:
    """The error has the numbers from which a client can tell how many tokens it may ask for; that many are accepted."""
    error = output_budget(REQUEST, 90, 100)
    assert isinstance(error, RequestError) and (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    found = ROOM.search(error.message)
    assert found is not None
    prompt, output, limit = map(int, found.groups())
    assert (prompt, output, limit) == (90, 20, 100)
    assert output_budget(attrs.evolve(REQUEST, max_tokens=limit - prompt), 90, 100) == limit - prompt


@pytest.mark.parametrize("is_exact", [True, False])
def test_prompt_that_does_not_fit(is_exact: bool) -> None:
    """The error has the prompt's number of tokens, and the largest number that leaves room for an output."""
    error = prompt_too_long("messages", 100, 100, is_exact=is_exact)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    found = TOO_LONG.search(error.message)
    assert found is not None and found.groups() == ("100", "99")
    assert output_budget(REQUEST, 100, 100) == prompt_too_long("messages", 100, 100)
    assert output_budget(attrs.evolve(REQUEST, max_tokens=None), 99, 100) == 1


def test_output_that_may_be_shorter() -> None:
    """An output is limited to the room that is left, if that is enough; otherwise the prompt is what is too long."""
    request = attrs.evolve(REQUEST, least_room=8)
    assert [output_budget(request, prompt, 100) for prompt in (70, 80, 81, 92)] == [20, 20, 19, 8]
    error = output_budget(request, 93, 100)
    assert isinstance(error, RequestError) and (error.param, error.code) == ("messages", "context_length_exceeded")
    found = TOO_LONG.search(error.message)
    assert found is not None and found.groups() == ("93", "92")
    assert "no room for an output of 8 tokens" in error.message
    assert output_budget(attrs.evolve(request, max_tokens=5), 94, 100) == 5
