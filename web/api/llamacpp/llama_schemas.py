"""What is declared of llama.cpp's endpoints."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import attrs

from ..body_field import BOOLEAN, BodyField
from ..operation import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    GENERATION,
    MODELS,
    NUMBER_VALUE,
    OPERATORS,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    always,
    array,
    either,
    maybe,
    one_of,
    record,
)
from .llama_body import INFILL_REQUEST, REQUEST

_LIKELY: Final = {"id": COUNT, "token": TEXT_VALUE, "bytes": array(COUNT), "logprob": NUMBER_VALUE}
_PROBABILITIES: Final = array(record({**_LIKELY, "top_logprobs": array(record(_LIKELY))}))
_OUTPUT: Final = {"index": COUNT, "content": TEXT_VALUE, "tokens": array(COUNT), "id_slot": WHOLE}
_NUMBERS: Final = {"tokens_predicted": COUNT, "tokens_evaluated": maybe(COUNT)}
_SPEEDS: Final = {
    f"{name}_{unit}": NUMBER_VALUE for name in ("prompt", "predicted") for unit in ("ms", "per_token_ms", "per_second")
}
_OPTIONAL: Final = {"completion_probabilities": _PROBABILITIES}
_COMPLETION: Final = Named(
    "LlamaCompletion",
    record(
        {
            **_OUTPUT,
            **_NUMBERS,
            "stop": always(True),
            "model": TEXT_VALUE,
            "generation_settings": ANY_OBJECT,
            "has_new_line": FLAG,
            "truncated": FLAG,
            "stop_type": one_of("limit", "eos", "word"),
            "stopping_word": TEXT_VALUE,
            "tokens_cached": maybe(COUNT),
            "timings": record(
                {"cache_n": maybe(COUNT), "prompt_n": maybe(COUNT), "predicted_n": COUNT, **_SPEEDS},
            ),
        },
        _OPTIONAL,
    ),
)
COMPLETION: Final = Operation(
    summary="Create a completion, as llama.cpp does",
    tag=GENERATION,
    help="Of several prompts, or with `n_cmpl`, the answer is a list. With `stream`, it comes as events.",
    body=REQUEST,
    answer=either(_COMPLETION, array(_COMPLETION)),
    events=either(
        Named("LlamaCompletionPart", record({**_OUTPUT, **_NUMBERS, "stop": always(False)}, _OPTIONAL)),
        _COMPLETION,
        record({"error": {"type": "object"}}),
    ),
)
INFILL: Final = attrs.evolve(
    COMPLETION,
    summary="Fill in a gap in a text, as llama.cpp does",
    help="For models whose tokenizer has tokens for it. With `n_cmpl`, the answer is a list; with `stream`, events.",
    body=INFILL_REQUEST,
)
PROPS: Final = Operation(
    summary="Describe the model, as llama.cpp does",
    tag=MODELS,
    answer=record(
        {
            "default_generation_settings": record({"n_ctx": COUNT, "params": ANY_OBJECT}),
            "total_slots": COUNT,
            "model_path": maybe(TEXT_VALUE),
            "model_alias": maybe(TEXT_VALUE),
            "modalities": record({"vision": FLAG, "audio": FLAG}),
            "build_info": TEXT_VALUE,
            "is_sleeping": FLAG,
        }
    ),
)
SLOTS: Final = Operation(
    summary="Show how many sequences run, as llama.cpp does",
    tag=OPERATORS,
    query=(BodyField(name="fail_on_no_slot", type=BOOLEAN, help="Answer 503 if none is available."),),
    answer=array(record({"id": COUNT, "n_ctx": COUNT, "speculative": FLAG, "is_processing": FLAG})),
    others={HTTPStatus.SERVICE_UNAVAILABLE: "No slot is available."},
)
