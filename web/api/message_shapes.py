"""The fields of the objects within the bodies of Anthropic's Messages API: blocks, messages, tools and options."""

from __future__ import annotations

from quipu.actors.config.declarations import Bounds
from quipu.actors.messages.prompts import CacheTtl

from .body_field import OBJECT, BodyField, Schema, Shape, kind, shape, union
from .body_shapes import EFFORTS, STOP_STRINGS, choice, flag, inner, required, text, text_or_objects

CACHE_CONTROL = "cache_control"
OF_SERVERS = ("_tool_use", "_tool_result")
"""Ends of the types of calls that Anthropic's servers carry out, and of their results."""
NAMING = ("tool_addition", "tool_reference")
"""Types of blocks that name a tool, and are skipped unless it is a deferred one."""
SKIPPED = ("browser_state", "container_upload", "fallback", "mcp_tool_listing", "tool_removal")
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
_TOOL_REFERENCE = kind("tool_reference", text("tool_name"), _CONTROL)
_ADDED_TOOL = shape("type", text("name"), text("tool_name"), name="AddedTool")
_TOOL_ADDITION = kind("tool_addition", inner("tool", _ADDED_TOOL), _CONTROL)
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
    kind("text", text_or_objects("data", _FOUND, is_required=True), "media_type"),
    kind("content", text_or_objects("content", _FOUND, is_required=True)),
    name="DocumentSource",
)
_DOCUMENT = kind("document", inner("source", _SOURCE, is_required=True), text("title"), text("context"), _CONTROL)
_COMPACTION = kind("compaction", text("content"), _CONTROL)
_TEXTS = (_TEXT, _SEARCH_RESULT, _DOCUMENT, _COMPACTION, _TOOL_REFERENCE, _TOOL_ADDITION, _SKIPPED)
"""Kinds of blocks that any message may have."""
TEXT_BLOCK = union("type", *_TEXTS, name="SystemBlock")
_ANY_DOCUMENT = kind("document", "source", "title", "context", _CONTROL)
_OF_RESULT = (*(one for one in _TEXTS if one is not _DOCUMENT), _ANY_DOCUMENT, kind("image", "source", _CONTROL))
_RESULT_BLOCK = union("type", *_OF_RESULT, name="ToolResultBlock")
_IMAGE_SOURCE = union("type", kind("base64", required("data"), "media_type"), name="ImageSource")
_USER_BLOCK = union(
    "type",
    *_TEXTS,
    kind("image", inner("source", _IMAGE_SOURCE, is_required=True), _CONTROL),
    kind("tool_result", required("tool_use_id"), text_or_objects("content", _RESULT_BLOCK), flag("is_error"), _CONTROL),
    name="UserBlock",
    ignored=("citations", "toolset_name"),
)
_INPUT = BodyField(name="input", type=OBJECT, is_required=True)
_ASSISTANT_BLOCK = union(
    "type",
    *_TEXTS,
    kind("thinking", required("thinking"), "signature"),
    kind("redacted_thinking", required("data")),
    kind("tool_use", required("id"), required("name"), _INPUT, _CONTROL),
    also=("caller",),
    name="AssistantBlock",
    ignored=("citations", "toolset_name"),
)


def _content(blocks: Shape) -> BodyField:
    """Return the content of a message, which must not be empty."""
    texts: Schema = {"type": "string", "minLength": 1}
    listed: Schema = {"type": "array", "items": blocks, "minItems": 1}
    return BodyField(name="content", schema={"anyOf": [texts, listed]}, items=blocks, is_required=True)


MESSAGE = union(
    choice("role", "user", "assistant", "system"),
    kind("user", _content(_USER_BLOCK)),
    kind("assistant", text_or_objects("content", _ASSISTANT_BLOCK, is_required=True)),
    kind("system", _content(TEXT_BLOCK)),
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
        flag("defer_loading"),
        _CONTROL,
        is_default=True,
    ),
    kind("", _CONTROL, pattern="^(?!custom$)"),
    name="MessagesTool",
    ignored=("allowed_callers", "eager_input_streaming", "input_examples"),
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
THINKING = union("type", kind("enabled adaptive disabled", _BUDGET), name="Thinking", ignored=("display",))
METADATA = shape(text("user_id"), name="MessagesMetadata")
