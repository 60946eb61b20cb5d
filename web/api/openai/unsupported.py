"""Fields that would change the response and are not implemented.

Each is refused by name unless its value is neutral. Ignoring one would answer a request that the client did not make. A
field leaves its table when it is implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...request.errors import unsupported_parameter
from ..fields import Fields

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


def _is_boolean(value: Any) -> bool:
    """Either boolean: only slow tokenizers put spaces between special tokens, and none is used here."""
    return type(value) is bool


def _among(*values: object) -> Neutral:
    return lambda value: value in values


def _never(value: Any) -> bool:
    return False


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_EITHER: Mapping[str, Neutral] = {
    "ebnf": _empty,
    "stop_sequences": _empty,
    "json_schema": _empty,
    "kv_transfer_params": _empty,
    "length_penalty": _one,
    "logits_processors": _empty,
    "regex": _empty,
    "repetition_detection": _never,
    "spaces_between_special_tokens": _is_boolean,
    "structural_tag": _empty,
    "truncate_prompt_tokens": _empty,
    "use_beam_search": _empty,
    "vllm_xargs": _empty,
}

COMPLETIONS: Mapping[str, Neutral] = {
    **_EITHER,
    "enable_thinking": _empty,
    "functions": _empty,
    "max_output_tokens": _never,
    "tools": _empty,
    "add_special_tokens": _true,
    "prompt_embeds": _empty,
    "suffix": _empty,
    "thinking_token_budget": _among(-1),
    "top_logprobs": _empty,
}

CHAT: Mapping[str, Neutral] = {
    **_EITHER,
    "add_special_tokens": _empty,
    "audio": _empty,
    "best_of": _one,
    "chat_template": _empty,
    "echo": _empty,
    "max_output_tokens": _never,
    "mm_processor_kwargs": _empty,
    "modalities": _among([], ["text"]),
    "prediction": _empty,
    "reasoning": _empty,
    "text": _empty,
    "thinking": _empty,
    "web_search_options": _never,  # even an empty object requests a search
}

RESPONSES: Mapping[str, Neutral] = {
    **_EITHER,
    "add_special_tokens": _empty,
    "background": _empty,
    "best_of": _one,
    "chat_template": _empty,
    "context_management": _empty,
    "continue_final_message": _empty,
    "conversation": _never,
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
    "moderation": _never,
    "n": _one,
    "previous_response_id": _never,
    "prompt": _never,
    "prompt_logprobs": _false,
    "reasoning_effort": _among("none"),
    "response_format": _is_text_format,
    "return_token_ids": _empty,
    "return_tokens_as_token_ids": _empty,
    "structured_outputs": _empty,
    "thinking": _empty,
    "top_logprobs": _empty,
    "truncation": _among("disabled"),
    "verbosity": _among("medium"),
}


def refuse_unsupported(fields: Fields, table: Mapping[str, Neutral]) -> None:
    """Raise APIError for the first field of `table` with a value that is not neutral."""
    for name, is_neutral in table.items():
        value = fields.get(name)
        if value is not None and not is_neutral(value):
            raise unsupported_parameter(fields.param(name))
