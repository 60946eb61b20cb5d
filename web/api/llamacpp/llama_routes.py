"""llama.cpp's `POST /completion` and `/infill`, `GET /props` and `GET /slots`. Registered by `install_llama`.

What must always hold: nothing here shows a prompt, a text, or anything of one request to another's client. A slot is a
place for a sequence on an engine; its number means nothing, and only how many are busy is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import orjson
from quart import Response, request
from quart_trio import QuartTrio

import quipu
from quipu.actors.config.declarations import INFILL, LLAMA_COMPLETIONS
from quipu.actors.messages.prompts import TextPrompt
from quipu.actors.messages.sampling import SAMPLING_FIELDS
from quipu.actors.request_desk.interface import Desk, ServingInfo

from ...options import AppOptions
from ...request.errors import unavailable
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..generation import visible_to
from ..json_structure import MAX_VALUES
from ..operation import route
from ..query import Parameters
from ..whole_response import whole_response
from .llama_body import SAMPLING, UNLIMITED, read_infill, read_llama
from .llama_reply import LlamaReply
from .llama_schemas import COMPLETION, PROPS, SLOTS
from .llama_schemas import INFILL as INFILL_OPERATION

_SLOTS_AT_ONCE: Final = 1024


def install_llama(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the endpoints. `web/auth/auth.py` decides who may use them."""
    for endpoint in LLAMA_COMPLETIONS:
        _install_completion(app, desk, options, endpoint)

    @route(app, f"POST {INFILL}", INFILL_OPERATION)
    async def fill_in() -> Response:
        return await answer(INFILL, _read_infill, desk, options, MAX_VALUES)

    @route(app, "GET /props", PROPS)
    async def props() -> dict[str, Any]:
        info = visible_to(current_request_context().principal, desk.info)
        name = next(iter(info.all_names), None)
        return {
            "default_generation_settings": {"n_ctx": _context(info), "params": _defaults(info)},
            "total_slots": _num_slots(info) * len(desk.engines()),
            "model_path": name,
            "model_alias": name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"quipu-{quipu.__version__}",
            "is_sleeping": False,
        }

    @route(app, "GET /slots", SLOTS)
    async def slots() -> Response:
        fails = Parameters(request.args).flag("fail_on_no_slot") or False
        num_slots, engines = _num_slots(desk.info), desk.engines()
        busy = [min(engine.num_running, num_slots) for engine in engines]
        if fails and sum(busy) == num_slots * len(engines):
            raise unavailable("No slot is available.", "no_slot")
        return await whole_response(_slots(desk.info, num_slots, busy))


def _install_completion(app: QuartTrio, desk: Desk, options: AppOptions, endpoint: str) -> None:
    @route(app, f"POST {endpoint}", COMPLETION)
    async def complete() -> Response:
        return await answer(endpoint, partial(_read, desk), desk, options, MAX_VALUES)


async def _read(desk: Desk, parsed: ParsedRequest) -> Reply:
    tenant = current_request_context().principal.tenant

    async def encode(text: str, special: bool) -> list[int]:
        return (await desk.read_prompt(TextPrompt(text), "prompt", tenant, special=special)).token_ids

    return LlamaReply(await read_llama(parsed, encode), parsed.request_id, parsed.info.max_model_len)


async def _read_infill(parsed: ParsedRequest) -> Reply:
    return LlamaReply(await read_infill(parsed), parsed.request_id, parsed.info.max_model_len)


def _num_slots(info: ServingInfo) -> int:
    found = info.settings.get("max_num_seqs")
    return found if isinstance(found, int) and info.has_engines else 0


def _context(info: ServingInfo) -> int:
    return info.max_model_len if info.has_engines else 0


def _defaults(info: ServingInfo) -> dict[str, Any]:
    """Return the sampling of a request that says nothing of it."""
    declared = {field.name: field for field in SAMPLING_FIELDS if isinstance(field.default, int | float)}
    return {
        "n_predict": UNLIMITED,
        **{
            name: info.sampling_defaults.get(completion, declared[completion].default)
            for name, (completion, _) in SAMPLING.items()
            if completion in declared
        },
        "seed": UNLIMITED,
    }


def _slots(info: ServingInfo, num_slots: int, busy: list[int]) -> Iterator[bytes]:
    speculative = info.settings.get("speculative") not in (None, "off")
    told = {"n_ctx": _context(info), "speculative": speculative}
    all_slots = ((engine * num_slots + at, at < num) for engine, num in enumerate(busy) for at in range(num_slots))
    yield b"["
    made: list[dict[str, Any]] = []
    separator = b""
    for slot, is_busy in all_slots:
        made.append({"id": slot, **told, "is_processing": is_busy})
        if len(made) == _SLOTS_AT_ONCE:
            yield separator + orjson.dumps(made)[1:-1]
            made, separator = [], b","
    yield (separator if made else b"") + orjson.dumps(made)[1:-1] + b"]"
