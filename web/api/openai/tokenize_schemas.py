"""What is declared of the routes that show the tokens of prompts."""

from __future__ import annotations

from typing import Final

from quipu.actors.config.declarations import CHAT

from ..body_field import BOOLEAN, STRING, BodyField, Shape, shape
from ..body_table import SHAPES
from ..operation import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    MODELS,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    array,
    either,
    maybe,
    record,
)

MAX_TOKENS: Final = 1 << 20
"""Token ids that are decoded; as many as a prompt may have here (`prompt_encoder.MAX_READ_TOKENS`)."""
_NAMES = BodyField(name="return_token_strs", type=BOOLEAN, help="Also return each token as the vocabulary spells it.")
_MODEL = BodyField(name="model", type=STRING)
IDS: Final = shape(
    _MODEL,
    BodyField(
        name="tokens",
        schema={"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_TOKENS},
        is_required=True,
    ),
)
TEXT: Final = shape(
    _MODEL,
    BodyField(name="prompt", type=STRING, is_required=True),
    BodyField(name="add_special_tokens", type=BOOLEAN, default=True, help="Those that the tokenizer adds to a text."),
    _NAMES,
)
CHAT_TO_COUNT: Final = Shape((*SHAPES[CHAT].fields, _NAMES))

TOKENIZE = Operation(
    summary="Tokenize a text or a chat",
    tag=MODELS,
    help="A body has a `prompt`, or `messages` and what else a chat may have.",
    body=Named("PromptToTokenize", either(TEXT, CHAT_TO_COUNT)),
    answer=record(
        {"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT), "token_strs": maybe(array(TEXT_VALUE))}
    ),
)
DETOKENIZE = Operation(summary="Decode tokens to text", tag=MODELS, body=IDS, answer=record({"prompt": TEXT_VALUE}))
RENDER = Operation(
    summary="Render a chat with the model's template",
    tag=MODELS,
    body=SHAPES[CHAT],
    answer=record(
        {
            "request_id": TEXT_VALUE,
            "model": TEXT_VALUE,
            "sampling_params": ANY_OBJECT,
            "stream": FLAG,
            "cache_salt": maybe(TEXT_VALUE),
            "priority": WHOLE,
            "token_ids": array(COUNT),
            "prompt": TEXT_VALUE,
        }
    ),
)
