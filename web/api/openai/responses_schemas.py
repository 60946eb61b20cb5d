"""What is declared of responses: their bodies, answers, and the events of their streams."""

from __future__ import annotations

from quipu.actors.config.declarations import COMPACT, RESPONSES

from ..body_table import SHAPES
from ..operation import (
    ANY_OBJECT,
    FLAG,
    GENERATION,
    NUMBER_VALUE,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    Part,
    always,
    array,
    by_name,
    either,
    maybe,
    one_of,
    record,
)
from ..operation import (
    COUNT as COUNT_VALUE,
)
from ..usage_schemas import RESPONSE_USAGE
from .choices_schemas import TOKEN_LOGPROB

_STATUS = one_of("in_progress", "completed", "incomplete", "failed")
_RESPONSE_STATUS = one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
_TEXT_PART = record(
    {
        "type": always("output_text"),
        "text": TEXT_VALUE,
        "annotations": array(ANY_OBJECT),
        "logprobs": array(TOKEN_LOGPROB),
    }
)
_MESSAGE = record(
    {
        "type": always("message"),
        "id": TEXT_VALUE,
        "role": always("assistant"),
        "status": _STATUS,
        "content": array(_TEXT_PART),
    }
)
_REASONING = record(
    {"type": always("reasoning"), "id": TEXT_VALUE, "summary": array(ANY_OBJECT)},
    {"content": array(ANY_OBJECT), "status": _STATUS, "encrypted_content": maybe(TEXT_VALUE)},
)
_CALL = record(
    {
        "type": one_of("function_call", "custom_tool_call"),
        "id": TEXT_VALUE,
        "call_id": TEXT_VALUE,
        "name": TEXT_VALUE,
        "status": _STATUS,
    },
    {"arguments": TEXT_VALUE, "input": TEXT_VALUE, "namespace": TEXT_VALUE},
)
_USER_MESSAGE = record(
    {
        "type": always("message"),
        "id": TEXT_VALUE,
        "role": always("user"),
        "status": _STATUS,
        "content": array(record({"type": always("input_text"), "text": TEXT_VALUE})),
    }
)
_COMPACTION = record({"type": always("compaction"), "id": TEXT_VALUE, "encrypted_content": TEXT_VALUE})
RESPONSE_OBJECT = Named(
    "Response",
    record(
        {
            "id": TEXT_VALUE,
            "object": always("response"),
            "created_at": WHOLE,
            "completed_at": maybe(WHOLE),
            "status": _RESPONSE_STATUS,
            "error": maybe(ANY_OBJECT),
            "incomplete_details": maybe(record({"reason": TEXT_VALUE})),
            "output": array(Named("OutputItem", either(_MESSAGE, _REASONING, _CALL))),
            "usage": maybe(RESPONSE_USAGE),
            "background": FLAG,
            "frequency_penalty": NUMBER_VALUE,
            "instructions": maybe(TEXT_VALUE),
            "max_output_tokens": maybe(COUNT_VALUE),
            "max_tool_calls": maybe(COUNT_VALUE),
            "metadata": by_name(TEXT_VALUE),
            "model": TEXT_VALUE,
            "parallel_tool_calls": FLAG,
            "presence_penalty": NUMBER_VALUE,
            "previous_response_id": maybe(TEXT_VALUE),
            "prompt_cache_key": maybe(TEXT_VALUE),
            "safety_identifier": maybe(TEXT_VALUE),
            "user": maybe(TEXT_VALUE),
            "reasoning": record({"effort": maybe(TEXT_VALUE), "summary": maybe(TEXT_VALUE)}),
            "service_tier": TEXT_VALUE,
            "store": FLAG,
            "temperature": NUMBER_VALUE,
            "text": record({"format": ANY_OBJECT}),
            "tool_choice": either(TEXT_VALUE, ANY_OBJECT),
            "tools": array(ANY_OBJECT),
            "top_logprobs": COUNT_VALUE,
            "top_p": NUMBER_VALUE,
            "truncation": TEXT_VALUE,
        },
        {"conversation": record({"id": TEXT_VALUE})},
    ),
)
_OF_EVENTS: dict[str, Part] = {
    "sequence_number": COUNT_VALUE,
    "response": RESPONSE_OBJECT,
    "output_index": COUNT_VALUE,
    "item": ANY_OBJECT,
    "item_id": TEXT_VALUE,
    "content_index": COUNT_VALUE,
    "part": ANY_OBJECT,
    **dict.fromkeys(("delta", "text", "arguments", "input"), TEXT_VALUE),
    "logprobs": array(TOKEN_LOGPROB),
    "code": maybe(TEXT_VALUE),
    "message": TEXT_VALUE,
    "param": maybe(TEXT_VALUE),
}
"""Fields of events, each of some."""
RESPONSE_EVENT = Named(
    "ResponseEvent",
    {
        **record({"type": TEXT_VALUE}, _OF_EVENTS),
        "description": "The events of OpenAI's API; the last one has the whole response with its usage.",
    },
)
RESPONSE = Operation(
    summary="Create a response",
    tag=GENERATION,
    help="With `stream`, the answer comes as events. Responses are stored if the server is started to store them.",
    body=SHAPES[RESPONSES],
    answer=RESPONSE_OBJECT,
    events=RESPONSE_EVENT,
)
COUNT = Operation(
    summary="Count the tokens of a response's input",
    tag=GENERATION,
    help="Nothing is generated and nothing is counted as used.",
    body=SHAPES[RESPONSES],
    answer=record({"object": always("response.input_tokens"), "input_tokens": COUNT_VALUE}),
)
COMPACTION = Operation(
    summary="Replace a long history by a summary",
    tag=GENERATION,
    help="The output replaces the history in later requests: its newest user messages, and an item with a summary by "
    "the model, which only this server can read, for the same tenant.",
    body=SHAPES[COMPACT],
    answer=Named(
        "CompactedResponse",
        record(
            {
                "id": TEXT_VALUE,
                "object": always("response.compaction"),
                "created_at": WHOLE,
                "output": array(Named("CompactedItem", either(_USER_MESSAGE, _COMPACTION))),
                "usage": RESPONSE_USAGE,
            }
        ),
    ),
)
