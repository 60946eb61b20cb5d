"""What is declared of the list of models, in the shapes of both APIs."""

from __future__ import annotations

from http import HTTPStatus

from .body_field import BodyField
from .operation import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    MODELS,
    NULL,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    always,
    array,
    either,
    maybe,
    record,
)

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
_MODEL = Named(
    "Model",
    record(
        {
            "id": TEXT_VALUE,
            "object": always("model"),
            "created": WHOLE,
            "owned_by": TEXT_VALUE,
            "root": TEXT_VALUE,
            "parent": maybe(TEXT_VALUE),
            "max_model_len": maybe(COUNT),
            "block_size": maybe(COUNT),
        }
    ),
)
_ANTHROPIC_MODEL = Named(
    "AnthropicModel",
    record(
        {
            "type": always("model"),
            "id": TEXT_VALUE,
            "display_name": TEXT_VALUE,
            "created_at": {"type": "string", "format": "date-time"},
            "lifecycle": TEXT_VALUE,
            "deprecated_at": NULL,
            "retires_at": NULL,
            "line": NULL,
            "max_input_tokens": maybe(COUNT),
            "max_tokens": maybe(COUNT),
            "capabilities": NULL,
        }
    ),
)
_HEADER = "With the header `anthropic-version`, the answer has the shape of Anthropic's API."
LIST = Operation(
    summary="List the models",
    tag=MODELS,
    help=f"{_HEADER} `limit`, `after_id` and `before_id` are read only then.",
    query=(
        BodyField(name="limit", help=f"Models of a page, between 1 and {MAX_LIMIT}; {DEFAULT_LIMIT} if absent."),
        BodyField(name="after_id", help="Only models after this one."),
        BodyField(name="before_id", help="Only models before this one."),
    ),
    answer=either(
        Named(
            "ModelList",
            record({"object": always("list"), "data": array(_MODEL), "models": array(ANY_OBJECT)}),
        ),
        Named(
            "AnthropicModelList",
            record(
                {
                    "data": array(_ANTHROPIC_MODEL),
                    "has_more": FLAG,
                    "first_id": maybe(TEXT_VALUE),
                    "last_id": maybe(TEXT_VALUE),
                }
            ),
        ),
    ),
)
ONE = Operation(
    summary="Describe a model",
    tag=MODELS,
    help=_HEADER,
    path={"name": "The name of a model, which may have slashes."},
    answer=either(_MODEL, _ANTHROPIC_MODEL),
    others={HTTPStatus.NOT_FOUND: "There is no such model."},
)
