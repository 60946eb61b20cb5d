"""Adds a request's thinking budget to its sampling rules, and has its grammar begin after the reasoning.

Used by the tokenizer. `kernels/reasoning_budget.py` defines how outputs are counted. What must always hold: without
delimiters that the model can draw, there is no budget; nothing here grows with a prompt.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from ..messages.sampling import LogitRules, OutputGrammar, SamplingParams
from .encoder import TextEncoder

TokenIds = tuple[int, ...]

END_OF_PROMPT = 64
"""Last tokens of a prompt that are searched for reasoning that it leaves open."""


@attrs.frozen
class ReasoningDelimiters:
    opening_ids: TokenIds
    closing_ids: TokenIds


def encode_delimiters(tags: tuple[str, str], encoder: TextEncoder, vocab_size: int) -> ReasoningDelimiters | None:
    """Return the delimiters as ids, None if the model cannot draw them. Raises LibraryPanic."""
    opening, closing = (encoder.encode_within_text(tag) for tag in tags)
    # a tokenizer may have ids that the model does not
    if not opening or not closing or max(opening + closing) >= vocab_size:
        return None
    return ReasoningDelimiters(opening, closing)


def limit_reasoning(
    sampling: SamplingParams, num_tokens: int, delimiters: ReasoningDelimiters | None, max_model_len: int
) -> SamplingParams:
    """Add a budget of `num_tokens` to the rules, unless there are no delimiters or no output can be so long."""
    if delimiters is None or num_tokens >= max_model_len:
        return sampling
    rules = attrs.evolve(
        sampling.rules or LogitRules(),
        thinking_budget=num_tokens,
        reasoning_opening_ids=delimiters.opening_ids,
        reasoning_closing_ids=delimiters.closing_ids,
    )
    return attrs.evolve(sampling, rules=rules)


def sampling_after(
    prompt_token_ids: list[int], sampling: SamplingParams, special_token_ids: Collection[int]
) -> SamplingParams:
    rules, grammar = sampling.rules, sampling.grammar
    if rules is not None and rules.thinking_budget is not None:
        opens = _leaves_open(prompt_token_ids, rules, special_token_ids)
        sampling = attrs.evolve(sampling, rules=attrs.evolve(rules, prompt_opens_reasoning=bool(opens)))
    if grammar is not None and grammar.reasoning_opening_ids:
        opens = _leaves_open(prompt_token_ids, grammar, special_token_ids)
        grammar = attrs.evolve(grammar, prompt_opens_reasoning=bool(opens))
        if opens is False:  # the model is not to think again
            grammar = attrs.evolve(grammar, reasoning_opening_ids=(), reasoning_closing_ids=())
        sampling = attrs.evolve(sampling, grammar=grammar)
    return sampling


def _leaves_open(
    prompt_token_ids: list[int], rules: LogitRules | OutputGrammar, special_token_ids: Collection[int]
) -> bool | None:
    """Return whether reasoning that begins near the end of a prompt is still open; None if none begins.

    A special token after an opening delimiter ends the message, so that the delimiter is a client's text.
    """
    last = tuple(prompt_token_ids[-END_OF_PROMPT:])
    opening, closing = rules.reasoning_opening_ids, rules.reasoning_closing_ids
    begin = _find_last(last, opening)
    if begin is None:
        return None
    after = last[begin + len(opening) :]
    if any(token_id in special_token_ids for token_id in after):
        return None
    return _find_last(after, closing) is None


def _find_last(token_ids: TokenIds, ids: TokenIds) -> int | None:
    places = range(len(token_ids) - len(ids), -1, -1)
    return next((at for at in places if token_ids[at : at + len(ids)] == ids), None)


def place_grammar(text: str, tenant: str, owner: str, delimiters: ReasoningDelimiters | None) -> OutputGrammar:
    """Return the grammar of a request whose reasoning, if there can be any, has these delimiters."""
    if delimiters is None:
        return OutputGrammar(text, tenant=tenant, owner=owner)
    return OutputGrammar(text, delimiters.opening_ids, delimiters.closing_ids, tenant=tenant, owner=owner)
