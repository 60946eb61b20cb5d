"""Fields of OpenAI's API and of other endpoints that would change the response and are not implemented here.

Each is refused by name unless its value is neutral. Ignoring one would answer a request that the client did not make. A
field leaves its table when it is implemented. Fields that only other servers have are in `../foreign_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...request.errors import unsupported_parameter
from ..fields import Fields
from ..foreign_fields import refuse_foreign

Neutral = Callable[[Any], bool]
"""Returns whether a value has no effect. Null is not passed: it means absent."""


def _empty(value: Any) -> bool:
    """0, false, "", [] and {}."""
    return not value


def _false(value: Any) -> bool:
    """Return whether it is false; 0 would request the logprobs of the sampled tokens."""
    return value is False


def _one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1


def _true(value: Any) -> bool:
    return value is True


def _among(*values: object) -> Neutral:
    return lambda value: value in values


def _never(value: Any) -> bool:
    return False


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_EVERYWHERE: Mapping[str, Neutral] = {
    "audio": _empty,
    "background": _empty,
    "container": _empty,
    "context_management": _empty,
    "conversation": _never,
    "mcp_servers": _empty,
    "modalities": _among([], ["text"]),
    "moderation": _never,
    "output_config": _empty,
    "output_format": _empty,
    "prediction": _empty,
    "previous_response_id": _never,
    "stop_sequences": _empty,
    "suffix": _empty,
    "system": _empty,
    "thinking": _empty,
    "thread": _never,
    "truncation": _among("disabled"),
    "web_search_options": _never,  # even an empty object requests a search
}

COMPLETIONS: Mapping[str, Neutral] = {
    **_EVERYWHERE,
    "add_generation_prompt": _true,
    "add_special_tokens": _true,
    "chat_template": _empty,
    "chat_template_kwargs": _empty,
    "continue_final_message": _empty,
    "documents": _empty,
    "enable_thinking": _empty,
    "function_call": _among("auto", "none"),
    "functions": _empty,
    "instructions": _empty,
    "max_output_tokens": _never,
    "reasoning": _empty,
    "reasoning_effort": _among("none"),
    "text": _empty,
    "thinking_token_budget": _among(-1),
    "tool_choice": _among("auto", "none"),
    "tools": _empty,
    "top_logprobs": _empty,
}

CHAT: Mapping[str, Neutral] = {
    **_EVERYWHERE,
    "add_special_tokens": _empty,
    "best_of": _one,
    "chat_template": _empty,
    "echo": _empty,
    "instructions": _empty,
    "max_output_tokens": _never,
    "reasoning": _empty,
    "text": _empty,
}

RESPONSES: Mapping[str, Neutral] = {
    **_EVERYWHERE,
    "add_generation_prompt": _true,
    "add_special_tokens": _empty,
    "best_of": _one,
    "chat_template": _empty,
    "continue_final_message": _empty,
    "documents": _empty,
    "echo": _empty,
    "function_call": _among("auto"),
    "functions": _empty,
    "grammar": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "logprobs": _false,
    "n": _one,
    "prompt": _never,
    "prompt_logprobs": _false,
    "reasoning_effort": _among("none"),
    "response_format": _is_text_format,
    "return_token_ids": _empty,
    "return_tokens_as_token_ids": _empty,
    "structured_outputs": _empty,
    "top_logprobs": _empty,
    "verbosity": _among("medium"),
}


def refuse_unsupported(fields: Fields, table: Mapping[str, Neutral], *, with_hints: bool = True) -> None:
    """Raise APIError for the first field of `table`, or of other servers, with a value that is not neutral.

    `with_hints`: see `refuse_foreign`.
    """
    refuse_foreign(fields.values, with_hints=with_hints)
    for name, is_neutral in table.items():
        value = fields.get(name)
        if value is not None and not is_neutral(value):
            raise unsupported_parameter(fields.param(name))
