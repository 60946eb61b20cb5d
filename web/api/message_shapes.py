"""The fields of the objects within the bodies of Anthropic's Messages API: blocks, messages, tools and options."""

from __future__ import annotations

from quipu.actors.config.declarations import Bounds
from quipu.actors.messages.prompts import CacheTtl

from .body_field import OBJECT, BodyField, Schema, kind, shape, union
from .body_shapes import EFFORTS, STOP_STRINGS, choice, flag, inner, required, text, text_or_objects

CACHE_CONTROL = "cache_control"
OF_SERVERS = ("_tool_use", "_tool_result")
"""Ends of the types of calls that Anthropic's servers carry out, and of their results."""
SKIPPED = (
    *("browser_state", "container_upload", "fallback", "mcp_tool_listing"),
    *("tool_addition", "tool_reference", "tool_removal"),
)
"""Types of other blocks that are skipped."""

STOP_SEQUENCES: Schema = STOP_STRINGS
CONTROL = union(
    "type",
    kind("ephemeral", BodyField(name="ttl", schema={"enum": [ttl.value for ttl in CacheTtl]})),
    name="CacheControl",
)
_CONTROL = inner(CACHE_CONTROL, CONTROL)
_TEXT = kind("text", required("text"), _CONTROL)
_SKIPPED = kind(" ".join(SKIPPED), _CONTROL, pattern=f"({'|'.join(OF_SERVERS)})$")
TEXT_BLOCK = union("type", _TEXT, _SKIPPED, name="SystemBlock")
_FOUND = union("type", kind("text", required("text")), kind("image"), name="FoundText")
_SEARCH_RESULT = kind(
    "search_result",
    required("title"),
    required("source"),
    text_or_objects("content", _FOUND, is_required=True),
    _CONTROL,
)
_SOURCE = union(
    "type",
    kind("text", BodyField(name="data", type="string", is_required=True), "media_type"),
    kind("content", text_or_objects("content", _FOUND, is_required=True)),
    name="DocumentSource",
)
_DOCUMENT = kind("document", inner("source", _SOURCE, is_required=True), text("title"), text("context"), _CONTROL)
_COMPACTION = kind("compaction", text("content"), _CONTROL)
_IMAGE = kind("image", "source", _CONTROL)
_ANY_DOCUMENT = kind("document", "source", "title", "context", _CONTROL)
_RESULT_BLOCK = union(
    "type", _TEXT, _SEARCH_RESULT, _ANY_DOCUMENT, _COMPACTION, _IMAGE, _SKIPPED, name="ToolResultBlock"
)
_BLOCK = union(
    "type",
    _TEXT,
    _SEARCH_RESULT,
    _DOCUMENT,
    _COMPACTION,
    kind("thinking", required("thinking"), "signature"),
    kind("redacted_thinking", required("data")),
    kind(
        "tool_use", required("id"), required("name"), BodyField(name="input", type=OBJECT, is_required=True), _CONTROL
    ),
    kind("tool_result", required("tool_use_id"), text_or_objects("content", _RESULT_BLOCK), flag("is_error"), _CONTROL),
    _SKIPPED,
    also=("caller",),
    name="ContentBlock",
)
MESSAGE = shape(
    text_or_objects("content", _BLOCK, is_required=True),
    choice("role", "user", "assistant", "system", is_required=True),
    name="Message",
)
MESSAGES_TOOL = union(
    "type",
    kind(
        "custom",
        BodyField(name="name", schema={"type": "string", "minLength": 1}, is_required=True),
        text("description"),
        BodyField(name="input_schema", type=OBJECT, is_required=True),
        flag("strict"),
        _CONTROL,
        is_default=True,
    ),
    kind("", _CONTROL, pattern="^(?!custom$)"),
    name="MessagesTool",
)
TOOL_CHOICE = union(
    choice("type", "auto", "any", "tool", "none"),
    kind("auto any none", flag("disable_parallel_tool_use")),
    kind("tool", required("name"), flag("disable_parallel_tool_use")),
    name="MessagesToolChoice",
)
OUTPUT_FORMAT = union(
    "type", kind("json_schema", BodyField(name="schema", type=OBJECT, is_required=True)), name="OutputFormat"
)
OUTPUT_CONFIG = shape(choice("effort", *EFFORTS), inner("format", OUTPUT_FORMAT), name="OutputConfig")
_BUDGET = BodyField(name="budget_tokens", bounds=Bounds(minimum=1))
THINKING = union("type", kind("enabled adaptive disabled", _BUDGET), name="Thinking")
METADATA = shape(text("user_id"), name="MessagesMetadata")
