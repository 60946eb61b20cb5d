"""`POST /v1/responses`, `/v1/responses/input_tokens` and `/v1/responses/compact`. Registered by `install_responses`.

`stored_response_routes.py` has the routes for responses that are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import COMPACT, RESPONSES
from quipu.actors.request_desk.interface import Desk

from ...auth.sealed_texts import TenantSeal
from ...options import AppOptions
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..content import CallIds
from ..counting import CountedPrompt, count_tokens
from ..declared_body import Body
from ..generation import visible_to
from ..operation import route
from ..pace import Pace
from ..sampling import refuse_sampling
from .background_runs import BackgroundRuns
from .compaction import CompactionReply, kept_messages, response_of, summarizing
from .item_references import with_references
from .response_keeper import ResponseKeeper
from .response_state import ResponseState, read_state
from .responses import ResponseRequest, read_response
from .responses_reply import ResponseReply
from .responses_schemas import COMPACTION, COUNT, RESPONSE
from .store_door import StoreDoor
from .stored_items import input_items
from .triggered import TriggeredReply, is_triggered, triggered_response

COUNT_ENDPOINT = f"{RESPONSES}/input_tokens"


@attrs.frozen
class FoundResponse:
    body: dict[str, Any]
    """With the items that it refers to."""
    state: ResponseState
    asked_for: ResponseRequest
    is_triggered: bool
    """The input asks for a summary of itself."""


@attrs.frozen
class ResponseReader:
    """Reads bodies of responses, and what they continue."""

    door: StoreDoor | None = None
    """None: nothing is stored."""
    runs: BackgroundRuns = attrs.field(factory=lambda: BackgroundRuns(0))

    async def read(self, parsed: ParsedRequest) -> Reply:
        """Return the reply to a body. Raises APIError."""
        call_ids = CallIds(parsed.request_id, parsed.info.output.has_short_call_ids)
        found = await self.find(parsed)
        if found.is_triggered:
            return TriggeredReply(found.asked_for, found.state, call_ids, seal_of(parsed))
        reply, state = ResponseReply(found.asked_for, call_ids), found.state
        if self.door is not None and state.is_stored:
            async with Pace() as pace:
                items = await input_items(found.body.get("input"), parsed.request_id, pace)
            reply.keeper = ResponseKeeper(reply, state, items, self.door, self.runs, parsed.options, parsed.tenant)
        return reply

    async def read_compaction(self, parsed: ParsedRequest) -> Reply:
        """Return the reply to the body of a history that is to be compacted. Raises APIError."""
        fields = Body(parsed.body, COMPACT)
        fields.refuse_unsupported()
        refuse_sampling(fields)
        found = await self.find(parsed, compacts=True)
        async with Pace() as pace:
            context, value = found.state.context, found.body.get("input")
            kept = await kept_messages(context, value, parsed.request_id, parsed.info, pace)
        return CompactionReply(found.asked_for.wanted, parsed.request_id, kept, seal_of(parsed))

    async def find(self, parsed: ParsedRequest, *, compacts: bool = False) -> FoundResponse:
        """Read a body with what it refers to and continues. Raises APIError.

        `compacts`: it is a history that is to be compacted.
        """
        given, max_bytes = parsed.body, parsed.options.max_body_bytes
        is_asked = not compacts and is_triggered(given)
        body = triggered_response(given) if is_asked else response_of(given) if compacts else given
        body = await with_references(body, self.door, max_bytes, parsed.grow)
        state = await read_state(Body(body, RESPONSES), self.door, max_bytes, parsed.grow)
        max_sequences, seal = parsed.options.max_sequences, seal_of(parsed)
        asked_for = await read_response(body, parsed.info, max_sequences, state, seal)
        if compacts or is_asked:
            asked_for = attrs.evolve(asked_for, wanted=summarizing(asked_for.wanted, parsed.info, given))
        return FoundResponse(body, state, asked_for, is_asked)


def seal_of(parsed: ParsedRequest) -> TenantSeal:
    return parsed.options.seal.of(parsed.tenant)


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

    @route(app, f"POST {COMPACT}", COMPACTION)
    async def compact() -> Response:
        return await answer(COMPACT, reader.read_compaction, desk, options)

    async def read_counted(body: dict[str, Any], grow: Callable[[int], object]) -> CountedPrompt:
        context = current_request_context()
        info = visible_to(context.principal, desk.info)
        parsed = ParsedRequest(body, context.request_id, info, options, grow, context.principal.tenant)
        wanted = (await reader.find(parsed)).asked_for.wanted
        return CountedPrompt(wanted.prompts[0], wanted.prompt_param, wanted.unused_fields)
