"""SGLang's `POST /generate`. Registered by `install_generate`."""

from __future__ import annotations

from typing import Final

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import GENERATE
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ..answer import ParsedRequest, Reply, answer
from ..json_structure import MAX_VALUES
from ..operation import (
    COUNT,
    GENERATION,
    NULL,
    NUMBER_VALUE,
    TEXT_VALUE,
    Named,
    Operation,
    always,
    array,
    either,
    maybe,
    record,
    route,
)
from .generate_body import REQUEST, read_generate
from .generate_reply import GenerateReply

_IDS: Final = array(COUNT)
_ENTRY: Final = {
    "type": "array",
    "prefixItems": [maybe(NUMBER_VALUE), COUNT, maybe(TEXT_VALUE)],
    "minItems": 3,
    "items": False,
}
_LISTS: Final = {
    **{f"{side}_token_logprobs": array(_ENTRY) for side in ("input", "output")},
    **{f"{side}_top_logprobs": array(maybe(array(_ENTRY))) for side in ("input", "output")},
}
_FINISH: Final = either(
    record({"type": always("stop"), "matched": either(TEXT_VALUE, COUNT, NULL)}),
    record({"type": always("length"), "length": COUNT}),
    NULL,
)
_META: Final = Named(
    "GenerateMetaInfo",
    record(
        {
            "id": TEXT_VALUE,
            "finish_reason": _FINISH,
            "prompt_tokens": maybe(COUNT),
            "completion_tokens": COUNT,
            "cached_tokens": maybe(COUNT),
        },
        {"e2e_latency": NUMBER_VALUE, **_LISTS},
    ),
)
_OUTPUT: Final = Named(
    "GenerateOutput",
    record({"text": TEXT_VALUE, "output_ids": _IDS, "meta_info": _META}, {"prompt_token_ids": _IDS, "index": COUNT}),
)
OPERATION: Final = Operation(
    summary="Create a completion, as SGLang does",
    tag=GENERATION,
    help="Of several prompts, or with `n`, the answer is a list. With `stream`, it comes as events that repeat all "
    "text so far; the last one is `[DONE]`.",
    body=REQUEST,
    answer=either(_OUTPUT, array(_OUTPUT)),
    events=either(_OUTPUT, record({"error": {"type": "object"}})),
)


def install_generate(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the endpoint."""

    @route(app, f"POST {GENERATE}", OPERATION)
    async def generate() -> Response:
        return await answer(GENERATE, _read, desk, options, MAX_VALUES)


async def _read(parsed: ParsedRequest) -> Reply:
    wanted, wishes = await read_generate(parsed)
    return GenerateReply(wanted, parsed.request_id, wishes)
