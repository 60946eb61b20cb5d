"""The fields that the readers of this folder know, so that others can be reported as ignored (`../ignored_fields.py`).

A field is listed if it is read, refused unless neutral (`unsupported.py`), or merely passed along by the API's own
clients, such as the `id` of an item. `tests/web/api/test_ignored_fields.py` checks that every field that is read is
listed.
"""

from __future__ import annotations

from ..foreign_table import FOREIGN
from ..ignored_fields import Shape
from ..output_grammar import STRUCTURED_OUTPUTS
from ..sampling import SAMPLING_NAMES
from . import unsupported
from .prompt_cache import BREAKPOINT, OPTIONS, RETENTION

_GENERATION = SAMPLING_NAMES | {
    *FOREIGN,
    "cache_salt",
    "include_stop_str_in_output",
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "priority",
    "prompt_cache_key",
    OPTIONS,
    RETENTION,
    "return_cached_tokens_details",
    "skip_special_tokens",
    "stop",
    "stream",
    "stream_options",
    "user",
}
_CACHE_OPTIONS = Shape(known=frozenset({"mode", "prewarm", "ttl"}))
_BREAKPOINT = Shape(known=frozenset({"mode", "ttl"}))
_STREAM_OPTIONS = Shape(known=frozenset({"continuous_usage_stats", "include_obfuscation", "include_usage"}))
"""Deltas are never padded to hide their length, so `include_obfuscation` has no effect."""

_SCHEMA_FORMAT = Shape(known=frozenset({"description", "name", "schema", "strict", "type"}))
_FORMAT_FIELDS = frozenset({"at_least_one", "format", "json_schema", "schema", "structures", "triggers", "type"})
_FORMATS = {
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
}
_FORMAT_OBJECTS = {
    "response_format": Shape(known=_FORMAT_FIELDS, objects={"json_schema": _SCHEMA_FORMAT}),
    "structured_outputs": Shape(known=STRUCTURED_OUTPUTS),
}

COMPLETIONS_SHAPE = Shape(
    known=_GENERATION
    | _FORMATS
    | unsupported.COMPLETIONS.keys()
    | {"best_of", "echo", "logprobs", "prompt", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"},
    objects={OPTIONS: _CACHE_OPTIONS, "stream_options": _STREAM_OPTIONS, **_FORMAT_OBJECTS},
)

_CHAT_PART = Shape(known=frozenset({BREAKPOINT, "refusal", "type", "text"}), objects={BREAKPOINT: _BREAKPOINT})
_CHAT_FUNCTION_CALL = Shape(known=frozenset({"arguments", "name"}))
_CHAT_CALL = Shape(
    known=frozenset({"custom", "function", "id", "index", "type"}),
    objects={"custom": Shape(known=frozenset({"input", "name"})), "function": _CHAT_FUNCTION_CALL},
)
_CHAT_MESSAGE = Shape(
    known=frozenset(
        {
            "annotations",
            "audio",
            "content",
            "function_call",
            "name",
            "reasoning",
            "reasoning_content",
            "refusal",
            "role",
            "tool_call_id",
            "tool_calls",
        }
    ),
    objects={"function_call": _CHAT_FUNCTION_CALL},
    lists={"content": _CHAT_PART, "tool_calls": _CHAT_CALL},
)
CHAT_SHAPE = Shape(
    known=_GENERATION
    | _FORMATS
    | unsupported.CHAT.keys()
    | {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "enable_thinking",
        "function_call",
        "functions",
        "include_reasoning",
        "logprobs",
        "messages",
        "parallel_tool_calls",
        "prompt_logprobs",
        "reasoning_effort",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_logprobs",
        "verbosity",
    },
    objects={OPTIONS: _CACHE_OPTIONS, "stream_options": _STREAM_OPTIONS, **_FORMAT_OBJECTS},
    lists={"messages": _CHAT_MESSAGE},
)

_RESPONSE_PART = Shape(
    known=frozenset({BREAKPOINT, "annotations", "logprobs", "refusal", "text", "type"}),
    objects={BREAKPOINT: _BREAKPOINT},
)
_RESPONSE_OUTPUT = Shape(known=_RESPONSE_PART.known | {"outcome", "stderr", "stdout"}, objects=_RESPONSE_PART.objects)
_RESPONSE_ITEM = Shape(
    known=frozenset(
        {
            "action",
            "arguments",
            "call_id",
            "content",
            "encrypted_content",
            "id",
            "input",
            "name",
            "namespace",
            "operation",
            "output",
            "phase",
            "role",
            "status",
            "summary",
            "tools",
            "type",
        }
    ),
    lists={"content": _RESPONSE_PART, "output": _RESPONSE_OUTPUT, "summary": _RESPONSE_PART},
)
RESPONSES_SHAPE = Shape(
    known=_GENERATION
    | unsupported.RESPONSES.keys()
    | {
        "chat_template_kwargs",
        "client_metadata",
        "enable_thinking",
        "include",
        "include_reasoning",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "text",
        "thinking_token_budget",
        "tool_choice",
        "tools",
    },
    objects={
        OPTIONS: _CACHE_OPTIONS,
        "reasoning": Shape(known=frozenset({"effort", "generate_summary", "summary"})),
        "stream_options": _STREAM_OPTIONS,
        "text": Shape(known=frozenset({"format", "verbosity"}), objects={"format": _SCHEMA_FORMAT}),
    },
    lists={"input": _RESPONSE_ITEM},
)
