"""The fields of every body of a generation request, each declared once: who reads it, who refuses it, and its bounds.

Sampling fields (`actors/messages/sampling.py`) and those of other servers (`foreign_table.py`) are added to each body
here. `declared_body.py` reads and refuses by this table; `ignored_fields.py` names what an endpoint does not know.

What must always hold: a field that would change an endpoint's answer is read or refused there, never ignored. Of
several fields that are refused, the first in this table is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quipu.actors.config.declarations import (
    CHAT,
    COMPACT,
    COMPLETIONS,
    EVERY_API,
    MESSAGES,
    OPENAI,
    RESPONSES,
    Bounds,
)
from quipu.actors.messages.sampling import SAMPLING_FIELDS

from . import body_shapes as shapes
from . import item_shapes as items
from . import message_shapes as blocks
from .body_field import ARRAY, BOOLEAN, OFF, STRING, BodyField, Refusal, Schema, Shape, Why
from .foreign_table import FOREIGN
from .pooled_bodies import POOLED_BODIES, SIDES, TRUNCATION

MAX_CHOICES = 128
"""As in OpenAI's API."""
MAX_LOGPROBS = 20
"""Top logprobs for each token."""
_OTHER_LIMIT = Refusal(why=Why.UNKNOWN, instead="max_output_tokens")
_NO_CALL, _NO_LOGPROBS = Refusal(("auto", "none")), Refusal((False,))
_NEVER: tuple[object, ...] = ()
"""No value is without an effect."""
_TEXT = ({"type": "text"},)
_LOGPROBS = Bounds(minimum=0, maximum=MAX_LOGPROBS)
_ANY, _SOME = Bounds(minimum=0), Bounds(minimum=1)
_CHOICES = Bounds(minimum=1, maximum=MAX_CHOICES)
_PRIORITIES = Bounds(minimum=1 - 2**31, maximum=2**31 - 1)


def _field(
    name: str,
    *apis: str,
    off: tuple[object, ...] | None = None,
    messages: tuple[object, ...] | None = None,
    refusals: Mapping[str, Refusal] | None = None,
    **declared: Any,
) -> BodyField:
    """Declare a field that `apis` read.

    `off`: what the other OpenAI endpoints accept of it, None if they ignore it; `messages`: likewise `/v1/messages`;
    `refusals`: where that differs.
    """
    others = [api for api in OPENAI if api not in apis] if off is not None else []
    refused = {api: Refusal(off or ()) for api in others}
    if messages is not None:
        refused[MESSAGES] = Refusal(messages, Why.UNKNOWN)
    return BodyField(name=name, apis=apis, refusals={**refused, **(refusals or {})}, **declared)


def _list_of(shape: Shape) -> Schema:
    """Return the schema of objects that are not compared: a template shows them as they came."""
    return {"type": ARRAY, "items": shape}


FIELDS: tuple[BodyField, ...] = (
    # of no OpenAI endpoint
    _field("audio", off=OFF, messages=({},)),
    _field("compaction", off=OFF, refusals={MESSAGES: Refusal()}),
    _field("container", off=OFF, refusals={MESSAGES: Refusal(OFF)}),
    _field("context_management", off=OFF),
    _field("mcp_servers", off=OFF, refusals={MESSAGES: Refusal(OFF)}),
    _field("modalities", off=([], ["text"]), messages=([], ["text"])),
    _field("moderation", off=_NEVER, messages=_NEVER),
    _field("output_config", MESSAGES, off=OFF, inner=blocks.OUTPUT_CONFIG),
    _field("output_format", MESSAGES, off=OFF, inner=blocks.OUTPUT_FORMAT),
    _field("prediction", CHAT, off=OFF, messages=({},), inner=shapes.PREDICTION),
    _field("stop_sequences", MESSAGES, schema=blocks.STOP_SEQUENCES, off=OFF),
    _field("suffix", COMPLETIONS, type=STRING, off=OFF, messages=("",), help="The text after the gap."),
    _field("system", MESSAGES, type=STRING, off=OFF, items=blocks.TEXT_BLOCK),
    _field("thinking", MESSAGES, off=OFF, inner=blocks.THINKING),
    _field("thread", off=_NEVER, refusals={MESSAGES: Refusal(why=Why.IN_WORDS)}),
    _field(
        "truncation",
        RESPONSES,
        choices=("auto", "disabled"),
        default="disabled",
        off=("disabled",),
        messages=("disabled",),
    ),
    _field("web_search_options", off=_NEVER, messages=_NEVER),  # even an empty object requests a search
    # of one or more
    _field("background", RESPONSES, type=BOOLEAN, off=OFF, messages=(False,)),
    _field(
        "conversation",
        RESPONSES,
        schema=items.CONVERSATION_ID,
        off=_NEVER,
        messages=_NEVER,
        inner=items.CONVERSATION,
    ),
    _field("previous_response_id", RESPONSES, type=STRING, off=_NEVER, messages=_NEVER),
    _field("add_generation_prompt", CHAT, off=(True,), messages=(True,), default=True),
    _field("add_special_tokens", COMPLETIONS, attribute="add_special_tokens", default=True, off=OFF, messages=(False,)),
    _field("best_of", COMPLETIONS, off=(1,), messages=(1,), bounds=_SOME),
    _field(blocks.CACHE_CONTROL, MESSAGES, inner=blocks.CONTROL),
    _field("cache_salt", *EVERY_API, attribute="cache_salt", default="", max_length=256),
    _field("chat_template", off=OFF, messages=("",)),
    _field("chat_template_kwargs", CHAT, RESPONSES, MESSAGES, schema=shapes.TEMPLATE_KWARGS, off=OFF),
    _field("client_metadata", RESPONSES),
    _field("continue_final_message", CHAT, type=BOOLEAN, off=OFF, messages=(False,)),
    _field("documents", CHAT, schema=shapes.DOCUMENTS, off=OFF, messages=([],)),
    _field("echo", COMPLETIONS, type=BOOLEAN, off=OFF, messages=(False,)),
    _field("enable_thinking", CHAT, RESPONSES, type=BOOLEAN, off=OFF, messages=_NEVER),
    _field(
        "function_call",
        CHAT,
        schema=shapes.TOOL_CHOICE,
        messages=("auto",),
        refusals={COMPLETIONS: _NO_CALL, RESPONSES: Refusal(("auto",))},
    ),
    _field("functions", CHAT, schema=_list_of(shapes.CHAT_FUNCTION), off=OFF, messages=([],)),
    _field("grammar", COMPLETIONS, CHAT, type=STRING, off=OFF, messages=("",)),
    _field("guided_choice", COMPLETIONS, CHAT, schema=shapes.CHOICES, off=OFF, messages=([],)),
    _field("guided_grammar", COMPLETIONS, CHAT, schema=shapes.SOURCE, off=OFF, messages=("",)),
    _field("guided_json", COMPLETIONS, CHAT, schema=shapes.JSON_SCHEMA, off=OFF, messages=("",)),
    _field("guided_regex", COMPLETIONS, CHAT, schema=shapes.SOURCE, off=OFF, messages=("",)),
    _field("include", RESPONSES, schema=items.INCLUDE),
    _field("include_reasoning", CHAT, RESPONSES, messages=(True,), default=True),
    _field("include_stop_str_in_output", *OPENAI, messages=(False,), attribute="include_stop", default=False),
    _field("input", RESPONSES, type=STRING, items=items.RESPONSE_ITEM),
    _field("instructions", RESPONSES, type=STRING, off=OFF, messages=("",)),
    _field("logprobs", CHAT, type=BOOLEAN, is_portable=True),
    _field(
        "logprobs",
        COMPLETIONS,
        also=(False,),
        bounds=_LOGPROBS,
        messages=(False,),
        refusals={RESPONSES: _NO_LOGPROBS},
        is_portable=True,
    ),
    _field("max_tokens", CHAT, refusals={RESPONSES: _OTHER_LIMIT}, bounds=_SOME, is_portable=True),
    _field("max_tokens", COMPLETIONS, bounds=_ANY, is_portable=True),
    _field("max_tokens", MESSAGES, bounds=_ANY, is_required=True, is_portable=True),
    _field(
        "max_completion_tokens",
        CHAT,
        bounds=_SOME,
        messages=_NEVER,
        refusals={RESPONSES: _OTHER_LIMIT},
        is_portable=True,
    ),
    _field("max_completion_tokens", COMPLETIONS, bounds=_ANY, is_portable=True),
    _field("max_output_tokens", RESPONSES, off=_NEVER, messages=_NEVER, bounds=_SOME),
    _field("max_tool_calls", RESPONSES, bounds=_ANY),
    _field("messages", CHAT, type=ARRAY, is_required=True, min_items=1, items=shapes.CHAT_MESSAGE, is_portable=True),
    _field("messages", MESSAGES, type=ARRAY, is_required=True, min_items=1, items=blocks.MESSAGE),
    _field("metadata", CHAT, RESPONSES, schema=items.RESPONSE_METADATA, is_portable=True),
    _field("metadata", MESSAGES, inner=blocks.METADATA),
    _field("model", *EVERY_API, type=STRING, is_portable=True),
    _field("n", COMPLETIONS, CHAT, off=(1,), messages=(1,), default=1, bounds=_CHOICES, is_portable=True),
    _field("parallel_tool_calls", CHAT, RESPONSES, messages=(True,), default=True),
    _field("priority", *EVERY_API, attribute="priority", default=0, bounds=_PRIORITIES),
    _field(
        "prompt", COMPLETIONS, schema=shapes.PROMPT, is_required=True, refusals={RESPONSES: Refusal()}, is_portable=True
    ),
    _field("prompt_cache_key", *OPENAI, type=STRING, is_portable=True),
    _field("prompt_cache_options", *OPENAI, messages=({},), inner=shapes.CACHE_OPTIONS),
    _field("prompt_cache_retention", *OPENAI, choices=("in_memory", "24h")),
    _field(
        "prompt_logprobs",
        COMPLETIONS,
        CHAT,
        also=(False,),
        bounds=_LOGPROBS,
        messages=(False,),
        refusals={RESPONSES: _NO_LOGPROBS},
    ),
    _field("reasoning", RESPONSES, off=OFF, messages=({},), inner=items.REASONING),
    _field("reasoning_effort", CHAT, off=("none",), messages=_NEVER, choices=shapes.EFFORTS),
    _field("stream_options", *OPENAI, inner=shapes.STREAM_OPTIONS, is_portable=True),
    _field("response_format", COMPLETIONS, CHAT, off=_TEXT, messages=_TEXT, inner=shapes.RESPONSE_FORMAT),
    _field("return_cached_tokens_details", *OPENAI, type=BOOLEAN),
    _field("return_token_ids", COMPLETIONS, CHAT, type=BOOLEAN, off=OFF, messages=(False,)),
    _field("return_tokens_as_token_ids", COMPLETIONS, CHAT, type=BOOLEAN, off=OFF, messages=(False,)),
    _field("safety_identifier", RESPONSES, type=STRING, is_portable=True),
    _field("service_tier", RESPONSES, type=STRING),
    _field("skip_special_tokens", *OPENAI, messages=(True,), attribute="skip_special_tokens", default=True),
    _field("stop", *OPENAI, schema=shapes.STOP, messages=([],), is_portable=True),
    _field("store", CHAT, RESPONSES, type=BOOLEAN),
    _field("stream", *EVERY_API, type=BOOLEAN, is_portable=True),
    _field("structured_outputs", COMPLETIONS, CHAT, RESPONSES, messages=({},), inner=shapes.STRUCTURED_OUTPUTS),
    _field("text", RESPONSES, off=OFF, messages=({},), inner=items.RESPONSE_TEXT),
    _field("thinking_token_budget", CHAT, RESPONSES, off=(-1,), messages=(-1,), bounds=Bounds(minimum=-1)),
    _field("tool_choice", CHAT, RESPONSES, schema=shapes.TOOL_CHOICE, refusals={COMPLETIONS: _NO_CALL}),
    _field("tool_choice", MESSAGES, inner=blocks.TOOL_CHOICE),
    _field(TRUNCATION, COMPLETIONS, CHAT, off=OFF, messages=OFF, bounds=Bounds(minimum=-1)),
    _field("truncation_side", COMPLETIONS, CHAT, choices=SIDES),
    _field("tools", CHAT, schema=_list_of(shapes.CHAT_TOOL), refusals={COMPLETIONS: Refusal(OFF)}),
    _field("tools", RESPONSES, schema=_list_of(items.RESPONSE_TOOL)),
    _field("tools", MESSAGES, items=blocks.MESSAGES_TOOL),
    _field("top_logprobs", CHAT, RESPONSES, off=OFF, messages=(False, 0), bounds=_LOGPROBS, is_portable=True),
    _field("user", *OPENAI, type=STRING, is_portable=True),
    _field("verbosity", CHAT, type=STRING, refusals={RESPONSES: Refusal(("medium",))}),
)
"""What endpoints read and refuse, sampling fields apart."""


_IGNORED: Mapping[str, tuple[str, ...]] = {
    RESPONSES: ("access_programs", "background_options", "image"),
    MESSAGES: (
        *("billing_policy", "context_management", "diagnostics", "fallback_credit_token", "fallbacks"),
        *("inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id"),
    ),
}
"""Fields of an endpoint's own API that it ignores."""


def _shape_on(endpoint: str) -> Shape:
    """Return every field that an endpoint knows."""
    read = [field for field in FIELDS if endpoint in field.apis]
    refused = [attrs.evolve(field, inner=None, items=None) for field in FIELDS if endpoint in field.refusals]
    others = [BodyField(name=name) for name in (*FOREIGN, *(field.name for field in SAMPLING_FIELDS))]
    known = Shape((*read, *refused, *others), ".{}" if endpoint == MESSAGES else "[{}]", NAMES[endpoint])
    elsewhere = {field.name for field in FIELDS} - known.by_name.keys() if endpoint in OPENAI else set()
    return attrs.evolve(known, ignored=(*_IGNORED.get(endpoint, ()), *sorted(elsewhere)))


COMPACTED = (
    *("cache_salt", "chat_template_kwargs", "enable_thinking", "input", "instructions", "model", "parallel_tool_calls"),
    *("previous_response_id", "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "return_cached_tokens_details", "safety_identifier", "service_tier", "tools", "user"),
)
"""Fields of a response that are read for a history that is compacted, with the same meaning. Agents send `tools` and
`reasoning` along, so that the history becomes the same tokens as in its own requests."""
_NO_PART_OF_SUMMARIES = ("client_metadata", "text", *_IGNORED[RESPONSES])


def _compact_shape() -> Shape:
    """Return the fields of a history that is compacted: what else would change a response is refused."""
    others = {*FOREIGN, *(field.name for field in SAMPLING_FIELDS)}  # refused by their own tables
    fields = []
    for field in _shape_on(RESPONSES).fields:
        if field.name in COMPACTED:
            fields.append(attrs.evolve(field, apis=(COMPACT,), refusals={}))
        elif field.name in others:
            fields.append(field)
        elif field.name not in _NO_PART_OF_SUMMARIES:
            known = field.refusals[RESPONSES].neutral if RESPONSES in field.refusals else ()
            neutral = ("auto", "none") if field.name == "tool_choice" else (*OFF, field.default, *known)
            fields.append(attrs.evolve(field, apis=(), refusals={COMPACT: Refusal(neutral)}, inner=None, items=None))
    return Shape(tuple(fields), name=NAMES[COMPACT], ignored=_NO_PART_OF_SUMMARIES)


NAMES: Mapping[str, str] = {
    COMPLETIONS: "CompletionRequest",
    CHAT: "ChatCompletionRequest",
    RESPONSES: "ResponseRequest",
    COMPACT: "CompactRequest",
    MESSAGES: "MessageRequest",
}
"""Of each endpoint's body in the OpenAPI document."""
SHAPES: Mapping[str, Shape] = {
    **{endpoint: _shape_on(endpoint) for endpoint in EVERY_API},
    COMPACT: _compact_shape(),
    **{
        endpoint: Shape((*body.fields, *(BodyField(name=name) for name in FOREIGN)))
        for endpoint, body in POOLED_BODIES.items()
    },
}
"""What each endpoint knows."""
PROMPT_FIELDS: Mapping[str, str] = {COMPLETIONS: "prompt", CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}
"""The field that has each endpoint's prompt."""
PORTABLE = frozenset(field.name for fields in (FIELDS, SAMPLING_FIELDS) for field in fields if field.is_portable)
"""Fields that mean the same to every server. Not among them: `seed`, whose tokens are those of one implementation, and
tools and schemas, for which servers need flags."""
