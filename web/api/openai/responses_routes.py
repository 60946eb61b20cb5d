"""`POST /v1/responses` and `/v1/responses/input_tokens`. Registered by `install_responses`.

`stored_response_routes.py` has the routes for responses that are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import attrs
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import RESPONSES
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ...request.errors import not_found
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..content import CallIds
from ..counting import CountedPrompt, count_tokens
from ..declared_body import Body
from ..generation import visible_to
from ..operation import route
from ..pace import Pace
from .background_runs import BackgroundRuns
from .item_references import with_references
from .response_keeper import ResponseKeeper
from .response_state import read_state
from .responses import read_response
from .responses_reply import ResponseReply
from .responses_schemas import COMPACT, COUNT, RESPONSE
from .store_door import StoreDoor
from .stored_items import input_items

COUNT_ENDPOINT = f"{RESPONSES}/input_tokens"
COMPACT_ENDPOINT = f"{RESPONSES}/compact"


@attrs.frozen
class ResponseReader:
    """Reads bodies of responses, and what they continue."""

    door: StoreDoor | None = None
    """None: nothing is stored."""
    runs: BackgroundRuns = attrs.field(factory=lambda: BackgroundRuns(0))

    async def read(self, parsed: ParsedRequest) -> Reply:
        """Return the reply to a body. Raises APIError."""
        call_ids = CallIds(parsed.request_id, parsed.info.output.has_short_call_ids)
        options = parsed.options
        body = await with_references(parsed.body, self.door, options.max_body_bytes, parsed.grow)
        fields = Body(body, RESPONSES)
        state = await read_state(fields, self.door, options.max_body_bytes, parsed.grow)
        reply = ResponseReply(await read_response(body, parsed.info, options.max_sequences, state), call_ids)
        if self.door is not None and state.is_stored:
            async with Pace() as pace:
                items = await input_items(fields.get("input"), parsed.request_id, pace)
            tenant = current_request_context().principal.tenant
            reply.keeper = ResponseKeeper(reply, state, items, self.door, self.runs, options, tenant)
        return reply


read = ResponseReader().read
"""Without anything stored."""


def install_responses(app: QuartTrio, desk: Desk, options: AppOptions, reader: ResponseReader) -> None:
    """Register the routes."""

    @route(app, f"POST {RESPONSES}", RESPONSE)
    async def create_response() -> Response:
        return await answer(RESPONSES, reader.read, desk, options)

    @route(app, f"POST {COUNT_ENDPOINT}", COUNT)
    async def count_input() -> dict[str, Any]:
        num_tokens = await count_tokens(RESPONSES, read_counted, desk)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @route(app, f"POST {COMPACT_ENDPOINT}", COMPACT)
    async def compact() -> NoReturn:
        message = (
            "This server does not compact histories. Ask for a summary of the history in a response, or leave out the "
            "oldest items."
        )
        raise not_found(message, None, "compaction_not_supported")

    async def read_counted(body: dict[str, Any], grow: Callable[[int], object]) -> CountedPrompt:
        body = await with_references(body, reader.door, options.max_body_bytes, grow)
        state = await read_state(Body(body, RESPONSES), reader.door, options.max_body_bytes, grow)
        info = visible_to(current_request_context().principal, desk.info)
        wanted = (await read_response(body, info, options.max_sequences, state)).wanted
        return CountedPrompt(wanted.prompts[0], wanted.prompt_param, wanted.unused_fields)
