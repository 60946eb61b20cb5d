"""The fields of the objects within the bodies of Responses: items of the input, tools, reasoning, and formats."""

from __future__ import annotations

from ..auth.sealed_texts import MAX_SEALED_CHARS
from .body_field import OBJECT, STRING, BodyField, Schema, kind, shape, union
from .body_shapes import (
    ARGUMENTS,
    BREAKPOINT_FIELD,
    EFFORTS,
    TOOL_NAME,
    choice,
    flag,
    inner,
    objects,
    required,
    text,
    text_or_objects,
)

MAX_INCLUDED = 64
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
SKIPPED = (
    *("agent_message", "code_interpreter_call", "compaction_trigger", "computer_call", "computer_call_output"),
    *("configuration_update", "context_compaction", "file_search_call"),
    *("image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("program", "program_output", "tool_search_call", "tool_search_output", "web_search_call"),
)
"""Types of items that are skipped."""
COMPACTIONS = ("compaction", "compaction_summary")
"""Types of items with a sealed summary. Agents know both."""
_SUMMARIES = ("auto", "concise", "detailed", "none")

INCLUDE: Schema = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_INCLUDED}
RESPONSE_METADATA: Schema = {
    "type": "object",
    "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
    "maxProperties": MAX_METADATA_PAIRS,
}
_TEXT = kind("input_text output_text", required("text"), BREAKPOINT_FIELD, "annotations", "logprobs")
_REFUSAL = kind("refusal", required("refusal"), BREAKPOINT_FIELD)
_IMAGE = kind("input_image", required("image_url"), BREAKPOINT_FIELD, "detail")
_PART = union("type", _TEXT, _REFUSAL, _IMAGE, name="ResponsePart")
_RESULT_PART = union("type", _TEXT, kind("input_image input_file"), name="ResponseResultPart")
_PRINTED = shape(text("stdout"), text("stderr"), "outcome", name="ShellOutput")
_THOUGHT = union("type", kind("reasoning_text text", required("text"), BREAKPOINT_FIELD), name="ReasoningPart")
_SUMMARY = union("type", kind("summary_text", required("text"), BREAKPOINT_FIELD), name="SummaryPart")
_FUNCTION = kind(
    "function",
    BodyField(name="name", schema=TOOL_NAME, is_required=True),
    text("description"),
    BodyField(name="parameters", type=OBJECT),
    flag("strict"),
)
_CUSTOM = kind(
    "custom",
    BodyField(name="name", schema=TOOL_NAME, is_required=True),
    text("description"),
    BodyField(name="format", type=OBJECT),
)
_OTHER_TOOL = kind("", pattern="^(?!(function|custom|namespace)$)")
RESPONSE_TOOL = union(
    "type",
    _FUNCTION,
    _CUSTOM,
    kind(
        "namespace",
        BodyField(name="name", schema=TOOL_NAME, is_required=True),
        text("description"),
        objects("tools", union("type", _FUNCTION, _CUSTOM, _OTHER_TOOL, name="GroupedTool")),
    ),
    _OTHER_TOOL,
    name="ResponseTool",
    ignored=("allowed_callers", "async", "defer_loading", "output_schema"),
)
_CALL = required("call_id")
_ACTION, _OPERATION = (BodyField(name=name, type=OBJECT, is_required=True) for name in ("action", "operation"))
_RESULT = (text("call_id"), text("name"))
_OUTPUT = text_or_objects("output", _RESULT_PART, is_required=True)
RESPONSE_ITEM = union(
    "type",
    kind(
        "message",
        choice("role", "user", "assistant", "system", "developer", is_required=True),
        text_or_objects("content", _PART, is_required=True),
        is_default=True,
    ),
    kind("function_call", ARGUMENTS, _CALL, required("name"), text("namespace")),
    kind("custom_tool_call", required("input"), _CALL, required("name"), text("namespace")),
    kind("local_shell_call shell_call", _CALL, _ACTION),
    kind("apply_patch_call", _CALL, _OPERATION),
    kind("function_call_output custom_tool_call_output local_shell_call_output", _OUTPUT, *_RESULT),
    kind("apply_patch_call_output", text_or_objects("output", _RESULT_PART), *_RESULT),
    kind("shell_call_output", objects("output", _PRINTED, is_required=True), *_RESULT),
    kind(
        "reasoning",
        text_or_objects("content", _THOUGHT),
        text_or_objects("summary", _SUMMARY),
        "encrypted_content",
    ),
    kind(
        " ".join(COMPACTIONS),
        BodyField(name="encrypted_content", type=STRING, is_required=True, max_length=MAX_SEALED_CHARS),
    ),
    kind("item_reference", required("id"), is_default=True),
    kind("additional_tools", objects("tools", RESPONSE_TOOL)),
    kind(" ".join(SKIPPED)),
    also=("action", "encrypted_content", "id", "phase", "status", "tools"),
    name="ResponseItem",
    ignored=("async", "caller"),
)
CONVERSATION_ID: Schema = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}]
}
CONVERSATION = shape(required("id"))
MAX_ADDED = 20
"""Items that are added to a conversation at once, as in OpenAI's API."""
_METADATA = BodyField(name="metadata", schema=RESPONSE_METADATA)
NEW_CONVERSATION = shape(objects("items", RESPONSE_ITEM), _METADATA, name="NewConversation")
MORE_ITEMS = shape(objects("items", RESPONSE_ITEM, is_required=True, min_items=1), name="ConversationItems")
NEW_METADATA = shape(
    BodyField(name="metadata", schema=RESPONSE_METADATA, is_required=True),
    name="NewMetadata",
)
REASONING = shape(
    choice("effort", *EFFORTS),
    choice("generate_summary", *_SUMMARIES),
    choice("summary", *_SUMMARIES),
    name="Reasoning",
    ignored=("context", "mode"),
)
_FORMAT = union(
    "type",
    kind("text"),
    kind("json_object", BodyField(name="schema", type=OBJECT)),
    kind(
        "json_schema",
        text("description"),
        required("name"),
        BodyField(name="schema", type=OBJECT, is_required=True),
        flag("strict"),
    ),
    name="ResponseTextFormat",
)
RESPONSE_TEXT = shape(inner("format", _FORMAT), text("verbosity"), name="ResponseText")
