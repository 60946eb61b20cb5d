"""Prompts as `/v1/completions` and `/v1/embeddings` take them: a text, a list of texts, a list of token ids, or a list
of lists of token ids.

What must always hold: a list is refused by its length before its items are looked at, and a prompt of token ids that
cannot fit the context before they are copied.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.prompts import Prompt, TextPrompt, TokenPrompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value, invalid
from ..fields import Fields, many_token_ids, missing, wrong_type
from ..pace import Pace
from ..pooled_bodies import TRUNCATION

MAX_READ_TOKENS = 1 << 20
"""Of one prompt that is shortened, as in the tokenizer."""
_NUM_LOOKED_AT = 1024
"""Items of a list by which its kind is determined."""
PROMPT_TYPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


async def read_prompts(
    fields: Fields, name: str, info: ServingInfo, max_sequences: int, pace: Pace, expected: str = PROMPT_TYPES
) -> tuple[Prompt, ...]:
    """Return the prompts in a field. `expected` are its types, for messages. Raises APIError."""
    value = fields.get(name)
    if value is None:
        raise missing(name)
    if type(value) is str:
        return (TextPrompt(value),)
    if type(value) is not list:
        raise wrong_type(name, expected)
    if not value:
        raise bad_value(name, "must not be empty")
    kinds = set(map(type, value[:_NUM_LOOKED_AT]))
    if kinds == {int}:
        return (await _token_prompt(value, fields, name, name, info, pace),)
    if len(value) > max_sequences:
        raise bad_value(name, f"must have at most {max_sequences} prompts")
    kinds = set(map(type, value))
    if len(kinds) > 1 or not kinds <= {str, list}:
        raise wrong_type(name, expected)
    if kinds == {str}:
        return tuple(map(TextPrompt, value))
    return tuple(
        [await _token_prompt(ids, fields, name, f"{name}[{index}]", info, pace) for index, ids in enumerate(value)]
    )


async def _token_prompt(
    ids: list[Any], fields: Fields, name: str, where: str, info: ServingInfo, pace: Pace
) -> TokenPrompt:
    if not ids:
        raise invalid(f"Invalid value for `{where}`: must have at least one token.", name)
    if len(ids) > info.max_model_len and fields.get(TRUNCATION) is None:
        message = f"Invalid value for `{where}`: has {len(ids)} tokens, but the context length is {info.max_model_len}."
        raise invalid(message, name, "context_length_exceeded")
    if len(ids) > MAX_READ_TOKENS:
        raise invalid(f"Invalid value for `{where}`: must not have more than {MAX_READ_TOKENS} tokens.", name)
    return TokenPrompt(await many_token_ids(ids, name, info.vocab_size, pace))
