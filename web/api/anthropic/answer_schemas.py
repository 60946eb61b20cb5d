"""What is declared of Anthropic's Messages API: bodies, answers, and the events of streams."""

from __future__ import annotations

from quipu.actors.config.declarations import MESSAGES

from ..body_field import Shape
from ..body_table import SHAPES
from ..operation import (
    ANY_OBJECT,
    GENERATION,
    NULL,
    TEXT_VALUE,
    Named,
    Operation,
    always,
    array,
    either,
    maybe,
    one_of,
    record,
)
from ..operation import (
    COUNT as COUNT_VALUE,
)

_COUNTED = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("cache_control", "chat_template_kwargs"),
)
"""Fields that make the prompt, or would."""
_READ = {field.name: field for field in SHAPES[MESSAGES].fields if MESSAGES in field.apis}
COUNTED = Shape(
    tuple(_READ[name] for name in _COUNTED),
    name="CountTokensRequest",
    ignored=SHAPES[MESSAGES].ignored,
)

_COUNTS = {
    "input_tokens": COUNT_VALUE,
    "cache_creation_input_tokens": maybe(COUNT_VALUE),
    "cache_read_input_tokens": maybe(COUNT_VALUE),
    "cache_creation": maybe(
        record({"ephemeral_5m_input_tokens": COUNT_VALUE, "ephemeral_1h_input_tokens": COUNT_VALUE})
    ),
    "output_tokens": COUNT_VALUE,
    "output_tokens_details": record({"thinking_tokens": COUNT_VALUE}),
}
_USAGE = Named("MessageDeltaUsage", record(_COUNTS))
_WHOLE_USAGE = Named(
    "MessageUsage",
    record(
        {
            **_COUNTS,
            "server_tool_use": NULL,
            "service_tier": always("standard"),
            "inference_geo": NULL,
            "speed": always("standard"),
        }
    ),
)
_TEXT = record({"type": always("text"), "text": TEXT_VALUE})
_THINKING = record({"type": always("thinking"), "thinking": TEXT_VALUE, "signature": TEXT_VALUE})
_TOOL_USE = record({"type": always("tool_use"), "id": TEXT_VALUE, "name": TEXT_VALUE, "input": ANY_OBJECT})
_BLOCK = Named("AnswerBlock", either(_TEXT, _THINKING, _TOOL_USE))
_STOP_REASON = maybe(one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"))
_ENDING = {
    "stop_reason": _STOP_REASON,
    "stop_sequence": maybe(TEXT_VALUE),
    "stop_details": NULL,
    "container": NULL,
}
_MESSAGE = Named(
    "AnswerMessage",
    record(
        {
            "id": TEXT_VALUE,
            "type": always("message"),
            "role": always("assistant"),
            "model": TEXT_VALUE,
            "content": array(_BLOCK),
            **_ENDING,
            "usage": _WHOLE_USAGE,
        }
    ),
)
_DELTA = either(
    record({"type": always("text_delta"), "text": TEXT_VALUE}),
    record({"type": always("thinking_delta"), "thinking": TEXT_VALUE}),
    record({"type": always("signature_delta"), "signature": TEXT_VALUE}),
    record({"type": always("input_json_delta"), "partial_json": TEXT_VALUE}),
)
_EVENT = Named(
    "MessageEvent",
    either(
        record({"type": always("message_start"), "message": _MESSAGE}),
        record({"type": always("content_block_start"), "index": COUNT_VALUE, "content_block": _BLOCK}),
        record({"type": always("content_block_delta"), "index": COUNT_VALUE, "delta": _DELTA}),
        record({"type": always("content_block_stop"), "index": COUNT_VALUE}),
        record({"type": always("message_delta"), "delta": record(_ENDING), "usage": _USAGE}),
        record({"type": one_of("message_stop", "ping")}),
        record({"type": always("error"), "error": record({"type": TEXT_VALUE, "message": TEXT_VALUE})}),
    ),
)
MESSAGE = Operation(
    summary="Create a message",
    tag=GENERATION,
    help="With `stream`, the answer comes as events.",
    body=SHAPES[MESSAGES],
    answer=_MESSAGE,
    events=_EVENT,
)
COUNT = Operation(
    summary="Count the tokens of a conversation",
    tag=GENERATION,
    help="Nothing is generated and nothing is counted as used.",
    body=COUNTED,
    answer=record({"input_tokens": COUNT_VALUE}),
)
