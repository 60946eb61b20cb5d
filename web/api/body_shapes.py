"""The fields of the objects within request bodies: messages of chats, their parts, tools and options.

Those of Responses are in `item_shapes.py`, those of Anthropic's API in `message_shapes.py`.

A field is declared if it is read, or merely passed along by the API's own clients, such as the `id` of an item; any
other is named to the client as ignored. `body_table.py` puts these shapes into the bodies. The schemas of tools, and
tools of OpenAI's APIs, are not compared: the template shows them as they came.
"""

from __future__ import annotations

from .body_field import ARRAY, BOOLEAN, OBJECT, STRING, BodyField, Schema, Shape, kind, shape, union

BREAKPOINT = "prompt_cache_breakpoint"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_NAME_CHARS = 128
"""Of a tool, as Anthropic's API has it; OpenAI's bound is 64."""
MAX_STRUCTURED_CHOICES = 4096
"""Strings of a `choice`."""
MAX_TEMPLATE_KWARGS = 256
RESERVED_KWARGS = frozenset({"messages", "add_generation_prompt", "tools", "documents", "chat_template"})
"""Template variables that have fields of their own."""
MAX_DOCUMENT_FIELDS = 256

STOP_STRINGS: Schema = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
    "maxItems": MAX_STOP_STRINGS,
}
_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP: Schema = {"anyOf": [_STOP_STRING, STOP_STRINGS]}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        IDS,
        {"type": "array", "items": IDS, "minItems": 1},
    ]
}
TEMPLATE_KWARGS: Schema = {
    "type": "object",
    "propertyNames": {"not": {"enum": sorted(RESERVED_KWARGS)}},
    "maxProperties": MAX_TEMPLATE_KWARGS,
}
DOCUMENTS: Schema = {
    "type": "array",
    "items": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_DOCUMENT_FIELDS},
}
JSON_SCHEMA: Schema = {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]}
"""A schema, as an object or as text."""
CHOICES: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_STRUCTURED_CHOICES}
SOURCE: Schema = {"type": "string", "minLength": 1}
"""A pattern or a grammar."""


def choice(name: str, *choices: str, is_required: bool = False) -> BodyField:
    return BodyField(name=name, choices=choices, is_required=is_required)


def inner(name: str, of: Shape, *, is_required: bool = False) -> BodyField:
    return BodyField(name=name, inner=of, is_required=is_required)


def objects(name: str, items: Shape, *, is_required: bool = False, min_items: int = 0) -> BodyField:
    return BodyField(name=name, type=ARRAY, items=items, is_required=is_required, min_items=min_items)


def text_or_objects(name: str, items: Shape, *, is_required: bool = False, min_items: int = 0) -> BodyField:
    return BodyField(name=name, type=STRING, items=items, is_required=is_required, min_items=min_items)


def text(name: str) -> BodyField:
    return BodyField(name=name, type=STRING)


def required(name: str) -> BodyField:
    """Return a text that must be present."""
    return BodyField(name=name, type=STRING, is_required=True)


def flag(name: str) -> BodyField:
    return BodyField(name=name, type=BOOLEAN)


def anything(name: str, schema: Schema, *, is_required: bool = False) -> BodyField:
    return BodyField(name=name, schema=schema, is_required=is_required)


# ---------------------------------------------------------------- of all OpenAI endpoints

TTL: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,5}[smhd]$"}
CACHE_OPTIONS = shape(
    choice("mode", "implicit", "explicit"), flag("prewarm"), anything("ttl", TTL), name="PromptCacheOptions"
)
STREAM_OPTIONS = shape(
    flag("continuous_usage_stats"), flag("include_obfuscation"), flag("include_usage"), name="StreamOptions"
)
"""Deltas are never padded to hide their length, so `include_obfuscation` has no effect."""
BREAKPOINT_FIELD = inner(
    BREAKPOINT, union("mode", kind("explicit", anything("ttl", TTL)), name="PromptCacheBreakpoint")
)
_SCHEMA = BodyField(name="schema", type=OBJECT, is_required=True)
SCHEMA_FORMAT = shape(text("description"), required("name"), _SCHEMA, flag("strict"), "type", name="SchemaFormat")
RESPONSE_FORMAT = union(
    "type",
    kind("text"),
    kind("json_object", BodyField(name="schema", type=OBJECT)),
    kind("json_schema", inner("json_schema", SCHEMA_FORMAT, is_required=True)),
    kind("structural_tag", "at_least_one", "format", "structures", "triggers"),
    name="ResponseFormat",
)
STRUCTURED_OUTPUTS = shape(
    anything("choice", CHOICES),
    "disable_additional_properties",
    "disable_any_whitespace",  # white space is compact in any case
    "disable_fallback",  # nothing is fallen back on
    anything("grammar", SOURCE),
    anything("json", JSON_SCHEMA),
    flag("json_object"),
    anything("regex", SOURCE),
    anything("structural_tag", JSON_SCHEMA),
    "whitespace_pattern",
    name="StructuredOutputs",
)
TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$", "minLength": 1, "maxLength": MAX_NAME_CHARS}

# ---------------------------------------------------------------- chat

_PREDICTED = union("type", kind("text", required("text")), name="PredictedText")
PREDICTION = union(
    "type",
    kind("content", text_or_objects("content", _PREDICTED, is_required=True, min_items=1)),
    name="Prediction",
)
_ARGUMENTS: Schema = {"anyOf": [{"type": "string"}, {"type": "object"}]}
ARGUMENTS = anything("arguments", _ARGUMENTS, is_required=True)
_CHAT_CALLED = shape(ARGUMENTS, required("name"), name="CalledFunction")
_CHAT_CALL = union(
    "type",
    kind("function", inner("function", _CHAT_CALLED, is_required=True), required("id"), "index", is_default=True),
    kind(
        "custom",
        inner("custom", shape(required("input"), required("name")), is_required=True),
        required("id"),
        "index",
    ),
    name="ToolCall",
)
_TEXT_PART = kind("text", required("text"), BREAKPOINT_FIELD)
_CHAT_PART = union("type", _TEXT_PART, name="TextPart")
_IMAGE_URL = shape(required("url"), "detail")
_USER_PART = union(
    "type",
    _TEXT_PART,
    kind("image_url", inner("image_url", _IMAGE_URL, is_required=True), BREAKPOINT_FIELD),
    name="UserPart",
)
_ANSWER_PART = union("type", _TEXT_PART, kind("refusal", required("refusal"), BREAKPOINT_FIELD), name="AssistantPart")
_RESULT_PART = union("type", _TEXT_PART, kind("image_url input_audio file"), name="ToolResultPart")
CHAT_MESSAGE = union(
    choice("role", "system", "developer", "user", "assistant", "tool", "function"),
    kind("system developer", text_or_objects("content", _CHAT_PART, is_required=True, min_items=1), text("name")),
    kind("user", text_or_objects("content", _USER_PART, is_required=True, min_items=1), text("name")),
    kind(
        "assistant",
        text_or_objects("content", _ANSWER_PART),
        text("name"),
        text("refusal"),
        text("reasoning"),
        text("reasoning_content"),
        BodyField(name="audio", type=OBJECT),
        objects("tool_calls", _CHAT_CALL),
        inner("function_call", _CHAT_CALLED),
    ),
    kind(
        "tool",
        text_or_objects("content", _RESULT_PART, is_required=True, min_items=1),
        required("tool_call_id"),
        text("name"),
    ),
    kind("function", text_or_objects("content", _RESULT_PART), required("name")),
    also=("annotations",),
    name="ChatMessage",
)
CHAT_FUNCTION = shape(
    anything("name", TOOL_NAME, is_required=True),
    text("description"),
    BodyField(name="parameters", type=OBJECT),
    flag("strict"),
    name="FunctionDefinition",
)
CHAT_TOOL = union("type", kind("function", inner("function", CHAT_FUNCTION, is_required=True)), name="ChatTool")
_NAMED = shape(required("name"), text("namespace"))
_CALLED = inner("function", _NAMED, is_required=True)
_SOME_TOOLS = (
    anything("mode", {"enum": ["auto", "required"]}, is_required=True),
    anything("tools", {"type": ARRAY, "items": {"type": OBJECT}}, is_required=True),
)
_ONE_TOOL = union(
    "type",
    kind("function", _CALLED, is_default=True),
    kind("custom", inner("custom", _NAMED, is_required=True)),
    kind("function custom", *_NAMED.fields, is_default=True),
    kind("allowed_tools", inner("allowed_tools", shape(*_SOME_TOOLS), is_required=True)),
    kind("allowed_tools", *_SOME_TOOLS),
    name="ChosenTools",
)
TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required"]}, _ONE_TOOL]}
