"""The fields of a request that every version of its response object repeats.

What must always hold: what is repeated is small enough to be encoded several times, and shallow enough for the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quipu.actors.messages.sampling import LogitRules

from ...request.errors import bad_value
from ..fields import Fields, wrong_type
from ..generation import GenerationRequest
from ..item_shapes import MAX_METADATA_KEY_CHARS, MAX_METADATA_PAIRS, MAX_METADATA_VALUE_CHARS
from .response_state import ResponseState

MAX_ECHOED = 1 << 16
"""Characters of `tools`, and of each other field, that a response repeats; what is beyond them is left out."""
MAX_ECHOED_DEPTH = 128
_VALUE_CHARS = 8
"""For each value, besides the characters of a string."""
_TEXTS = ("prompt_cache_key", "safety_identifier", "user")
_FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict")


def read_echo(fields: Fields, wanted: GenerationRequest, state: ResponseState) -> Mapping[str, Any]:
    """Return what a response repeats. Raises APIError for fields that are read nowhere else."""
    choice = fields.get("tool_choice")
    fields.optional_text("service_tier")  # checked, although there is only one
    rules = wanted.sampling.rules or LogitRules()
    return {
        "background": state.is_background,
        **({} if state.conversation is None else {"conversation": {"id": state.conversation}}),
        "frequency_penalty": rules.frequency_penalty,
        "instructions": _repeated(fields.get("instructions")),
        "max_output_tokens": wanted.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls"),
        "metadata": read_metadata(fields),
        "model": wanted.model,
        "parallel_tool_calls": fields.flag("parallel_tool_calls"),
        "presence_penalty": rules.presence_penalty,
        "previous_response_id": state.previous,
        **{name: _repeated(fields.optional_text(name)) for name in _TEXTS},
        "reasoning": _read_reasoning(fields.fields("reasoning")),
        "service_tier": "default",
        "store": state.is_stored,
        "temperature": wanted.sampling.temperature,
        "text": {"format": _read_format(fields.fields("text"))},
        "tool_choice": _repeated(choice) or "auto",
        "tools": [_whole_tool(tool) for tool in _small(fields.get("tools") or [])],
        "top_logprobs": fields.integer("top_logprobs") or 0,
        "top_p": wanted.sampling.top_p,
        "truncation": "disabled",
    }


def _read_reasoning(reasoning: Fields) -> Mapping[str, Any]:
    # Both are checked; the reasoning itself is sent, so the kind of summary does not matter.
    summary, _ = reasoning.optional_text("summary"), reasoning.optional_text("generate_summary")
    return {"effort": reasoning.get("effort"), "summary": summary}


def _read_format(text: Fields) -> Mapping[str, Any]:
    """Return the format, without a schema that is too large."""
    form = text.fields("format")
    if form.get("type") is None:
        return {"type": "text"}
    names = ("type", "name", "description", "strict")
    told = {name: value for name in names if (value := _repeated(form.get(name))) is not None}
    if form.get("schema") is not None:
        told["schema"] = _repeated(form.get("schema")) or {}
    return told


def read_metadata(fields: Fields) -> Mapping[str, str]:
    """Return `metadata`, empty if absent. Raises APIError."""
    value = fields.get("metadata")
    if value is None:
        return {}
    if type(value) is dict and len(value) > MAX_METADATA_PAIRS:
        raise bad_value("metadata", f"must have at most {MAX_METADATA_PAIRS} pairs")
    if type(value) is not dict or any(type(text) is not str for text in value.values()):
        raise wrong_type("metadata", "an object of strings")
    if any(len(key) > MAX_METADATA_KEY_CHARS or len(text) > MAX_METADATA_VALUE_CHARS for key, text in value.items()):
        limits = f"{MAX_METADATA_KEY_CHARS} characters, values at most {MAX_METADATA_VALUE_CHARS}"
        raise bad_value("metadata", f"keys must have at most {limits}")
    return value


def _whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with every field that clients' types require of a function."""
    if tool.get("type") == "namespace" and type(tool.get("tools")) is list:
        return {**tool, "tools": [_whole_tool(inner) for inner in tool["tools"]]}
    return {**dict.fromkeys(_FUNCTION_FIELDS), **tool} if tool.get("type") == "function" else tool


def _repeated(value: Any) -> Any:
    """Return a value that is small enough to be repeated, None for any other."""
    return next(iter(_small([value])), None)


def _small(values: list[Any]) -> list[Any]:
    left = MAX_ECHOED
    kept = []
    for value in values:
        left -= _num_chars(value, left)
        if left < 0:
            break
        kept.append(value)
    return kept


def _num_chars(value: Any, limit: int) -> int:
    """Return about how many characters a value has as JSON, or more than `limit` if it is too large or too deep."""
    num_chars = depth = 0
    level = [value]
    while level:
        inner: list[Any] = []
        for item in level:
            num_chars += _VALUE_CHARS
            if type(item) in (str, dict, list):
                num_chars += len(item) * (1 if type(item) is str else _VALUE_CHARS)
            if num_chars > limit:
                return num_chars
            if type(item) is dict:
                inner += [*item, *item.values()]
            elif type(item) is list:
                inner += item
        depth += 1
        if depth > MAX_ECHOED_DEPTH:
            return limit + 1
        level = inner
    return num_chars
