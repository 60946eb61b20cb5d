"""The fields of the objects within request bodies: messages, their parts, tools and options.

A field is declared if it is read, or merely passed along by the API's own clients, such as the `id` of an item; any
other is named to the client as ignored. `body_table.py` puts these shapes into the bodies. The schemas of tools, and
tools of OpenAI's APIs, are not compared: the template shows them as they came.
"""

from __future__ import annotations

from quipu.actors.config.declarations import Bounds

from .body_field import BodyField, Shape, shape

BREAKPOINT = "prompt_cache_breakpoint"
CACHE_CONTROL = "cache_control"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed", "none")


def _choice(name: str, *choices: str) -> BodyField:
    return BodyField(name=name, choices=choices)


def _object(name: str, inner: Shape) -> BodyField:
    return BodyField(name=name, inner=inner)


def _list(name: str, items: Shape) -> BodyField:
    return BodyField(name=name, items=items)


# ---------------------------------------------------------------- of all OpenAI endpoints

CACHE_OPTIONS = shape(_choice("mode", "implicit", "explicit"), "prewarm", "ttl")
STREAM_OPTIONS = shape("continuous_usage_stats", "include_obfuscation", "include_usage")
"""Deltas are never padded to hide their length, so `include_obfuscation` has no effect."""
_BREAKPOINT = _object(BREAKPOINT, shape("mode", "ttl"))
_SCHEMA_FORMAT = shape("description", "name", "schema", "strict", "type")
RESPONSE_FORMAT = shape(
    "at_least_one", "format", _object("json_schema", _SCHEMA_FORMAT), "schema", "structures", "triggers", "type"
)
STRUCTURED_OUTPUTS = shape(
    "choice",
    "disable_additional_properties",
    "disable_any_whitespace",  # white space is compact in any case
    "disable_fallback",  # nothing is fallen back on
    "grammar",
    "json",
    "json_object",
    "regex",
    "structural_tag",
    "whitespace_pattern",
)

# ---------------------------------------------------------------- chat

PREDICTION = shape(_list("content", shape("text", "type")), "type")
_CHAT_CALLED = shape("arguments", "name")
_CHAT_CALL = shape(_object("custom", shape("input", "name")), _object("function", _CHAT_CALLED), "id", "index", "type")
CHAT_MESSAGE = shape(
    "annotations",
    "audio",
    _list("content", shape(_BREAKPOINT, "refusal", "text", "type")),
    _object("function_call", _CHAT_CALLED),
    "name",
    "reasoning",
    "reasoning_content",
    "refusal",
    _choice("role", "system", "developer", "user", "assistant", "tool", "function"),
    "tool_call_id",
    _list("tool_calls", _CHAT_CALL),
)

# ---------------------------------------------------------------- responses

_RESPONSE_PART = shape(_BREAKPOINT, "annotations", "logprobs", "refusal", "text", "type")
_RESPONSE_OUTPUT = shape(*_RESPONSE_PART.fields, "outcome", "stderr", "stdout")
RESPONSE_ITEM = shape(
    "action",
    "arguments",
    "call_id",
    _list("content", _RESPONSE_PART),
    "encrypted_content",
    "id",
    "input",
    "name",
    "namespace",
    "operation",
    _list("output", _RESPONSE_OUTPUT),
    "phase",
    _choice("role", "user", "assistant", "system", "developer"),
    "status",
    _list("summary", _RESPONSE_PART),
    "tools",
    "type",
)
REASONING = shape(
    _choice("effort", *EFFORTS), _choice("generate_summary", *_SUMMARIES), _choice("summary", *_SUMMARIES)
)
RESPONSE_TEXT = shape(_object("format", _SCHEMA_FORMAT), "verbosity")

# ---------------------------------------------------------------- Anthropic's messages

CONTROL = shape("ttl", "type")
_CONTROL = _object(CACHE_CONTROL, CONTROL)
TEXT_BLOCK = shape(_CONTROL, "text", "type")
_BLOCK = shape(
    _CONTROL,
    "caller",
    _list("content", TEXT_BLOCK),
    "context",
    "data",
    "id",
    "input",
    "is_error",
    "name",
    "signature",
    "source",
    "text",
    "thinking",
    "title",
    "tool_use_id",
    "type",
)
MESSAGE = shape(_list("content", _BLOCK), _choice("role", "user", "assistant", "system"))
MESSAGES_TOOL = shape(_CONTROL, "description", "input_schema", "name", "strict", "type")
TOOL_CHOICE = shape("disable_parallel_tool_use", "name", _choice("type", "auto", "any", "tool", "none"))
OUTPUT_FORMAT = shape("schema", "type")
OUTPUT_CONFIG = shape(_choice("effort", *EFFORTS), _object("format", OUTPUT_FORMAT))
THINKING = shape(BodyField(name="budget_tokens", bounds=Bounds(minimum=1)), "type")
METADATA = shape("user_id")
