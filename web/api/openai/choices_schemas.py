"""What is declared of completions and chats: their bodies, answers, and the chunks of their streams."""

from __future__ import annotations

from quipu.actors.config import declarations

from ..body_table import SHAPES
from ..operation import (
    COUNT,
    GENERATION,
    NULL,
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
from ..usage_schemas import OPENAI_USAGE, USAGE_OR_NULL

_IDS = array(COUNT)
_FINISH = ("stop", "length")
_TOKEN = {"token": TEXT_VALUE, "logprob": NUMBER_VALUE, "bytes": array(COUNT)}
TOKEN_LOGPROB = Named("TokenLogprob", record({**_TOKEN, "top_logprobs": array(record(_TOKEN))}))
_CHAT_LOGPROBS = Named(
    "ChatLogprobs",
    record(
        {
            "content": array(TOKEN_LOGPROB),
            "refusal": {"type": "null"},
        }
    ),
)
_LOGPROBS = Named(
    "CompletionLogprobs",
    record(
        {
            "text_offset": array(COUNT),
            "token_logprobs": array(maybe(NUMBER_VALUE)),
            "tokens": array(TEXT_VALUE),
            "top_logprobs": array(maybe(by_name(maybe(NUMBER_VALUE)))),
        }
    ),
)
_PROMPT_LOGPROBS = Named(
    "PromptLogprobs",
    array(maybe(by_name(record({"logprob": maybe(NUMBER_VALUE), "rank": maybe(COUNT), "decoded_token": TEXT_VALUE})))),
)
_FUNCTION = record({"name": TEXT_VALUE, "arguments": TEXT_VALUE})
_CALL = record({"id": TEXT_VALUE, "type": always("function"), "function": _FUNCTION})
_REASONING = {"reasoning_content": maybe(TEXT_VALUE), "reasoning": maybe(TEXT_VALUE)}
_MESSAGE = Named(
    "AssistantMessage",
    record(
        {"role": always("assistant"), "content": maybe(TEXT_VALUE), "refusal": {"type": "null"}},
        {**_REASONING, "tool_calls": array(_CALL), "function_call": _FUNCTION},
    ),
)
_STOP = either(TEXT_VALUE, COUNT, NULL)
_CHAT_FINISH = maybe(one_of(*_FINISH, "tool_calls", "function_call"))


def _envelope(name: str, choice: Named) -> dict[str, Part]:
    return {
        "id": TEXT_VALUE,
        "object": always(name),
        "created": WHOLE,
        "model": TEXT_VALUE,
        "choices": array(choice),
    }


_STOPS = {"stop_reason": _STOP, "matched_stop": _STOP}
_TEXT_CHOICE = Named(
    "CompletionChoice",
    record(
        {"index": COUNT, "text": TEXT_VALUE, "logprobs": maybe(_LOGPROBS), "finish_reason": maybe(one_of(*_FINISH))},
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS, "token_ids": _IDS, **_STOPS},
    ),
)
_CHAT_CHOICE = Named(
    "ChatChoice",
    record(
        {"index": COUNT, "message": _MESSAGE, "logprobs": maybe(_CHAT_LOGPROBS), "finish_reason": _CHAT_FINISH},
        {"token_ids": _IDS, **_STOPS},
    ),
)
_CALL_DELTA = record(
    {"index": COUNT, "function": record({"arguments": TEXT_VALUE}, {"name": TEXT_VALUE})},
    {"id": TEXT_VALUE, "type": always("function")},
)
_DELTA = record(
    {},
    {
        "role": always("assistant"),
        "content": maybe(TEXT_VALUE),
        **_REASONING,
        "tool_calls": array(_CALL_DELTA),
        "function_call": record({"arguments": TEXT_VALUE}, {"name": TEXT_VALUE}),
    },
)
_CHAT_CHUNK_CHOICE = Named(
    "ChatChunkChoice",
    record(
        {"index": COUNT, "delta": _DELTA, "logprobs": maybe(_CHAT_LOGPROBS), "finish_reason": _CHAT_FINISH},
        {"token_ids": _IDS, **_STOPS},
    ),
)
_ERROR_EVENT = record({"error": {"type": "object"}})
COMPLETION = Operation(
    summary="Create a completion",
    tag=GENERATION,
    help="With `stream`, the answer comes as events, the last of which is `[DONE]`.",
    body=SHAPES[declarations.COMPLETIONS],
    answer=Named("Completion", record({**_envelope("text_completion", _TEXT_CHOICE), "usage": OPENAI_USAGE})),
    events=either(
        Named("CompletionChunk", record(_envelope("text_completion", _TEXT_CHOICE), {"usage": USAGE_OR_NULL})),
        _ERROR_EVENT,
    ),
)
CHAT_OBJECT = Named(
    "ChatCompletion",
    record(
        {**_envelope("chat.completion", _CHAT_CHOICE), "usage": OPENAI_USAGE},
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS, "metadata": by_name(TEXT_VALUE)},
    ),
)
CHAT_COMPLETION = Operation(
    summary="Create a chat completion",
    tag=GENERATION,
    help="With `stream`, the answer comes as events, the last of which is `[DONE]`.",
    body=SHAPES[declarations.CHAT],
    answer=CHAT_OBJECT,
    events=either(
        Named(
            "ChatCompletionChunk",
            record(
                _envelope("chat.completion.chunk", _CHAT_CHUNK_CHOICE),
                {"usage": USAGE_OR_NULL, "prompt_token_ids": _IDS},
            ),
        ),
        _ERROR_EVENT,
    ),
)
