"""The routes of `/v1/responses`, and of `/v1/responses/input_tokens`. Registered by `install_responses`.

Responses are not stored: the routes for an earlier one answer with an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import RESPONSES
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ...request.errors import not_found
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..content import CallIds
from ..counting import CountedPrompt, count_tokens
from ..generation import visible_to
from ..operation import route
from ..stream import Stream, Transcript
from .responses import ResponseRequest, read_response
from .responses_body import ResponseVersions, with_items
from .responses_items import OutputItems
from .responses_schemas import COUNT, NOT_STORED, RESPONSE
from .responses_stream import ResponseWriter

COUNT_ENDPOINT = f"{RESPONSES}/input_tokens"


class ResponseReply(Reply):
    def __init__(self, asked_for: ResponseRequest, call_ids: CallIds) -> None:
        super().__init__(asked_for.wanted, f"resp_{call_ids.request_id}")
        self._created_at = int(time.time())
        self._echo = asked_for.echo
        self._call_ids = call_ids

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        is_cut = transcript.finish_reasons.get(0) is FinishReason.LENGTH and not self.wanted.is_prewarm
        output = self._items().output(transcript.content(0), is_whole=not is_cut)
        return with_items(self._versions().served(record, is_cut=is_cut), () if self.wanted.is_prewarm else output)

    def writer(self, stream: Stream) -> ResponseWriter:
        return ResponseWriter(stream, self._versions(), self._items())

    def _versions(self) -> ResponseVersions:
        return ResponseVersions(self.answer_id, self._created_at, self._echo, self.wanted)

    def _items(self) -> OutputItems:
        return OutputItems(self._call_ids, self.wanted.rules)


def install_responses(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the routes."""

    @route(app, f"POST {RESPONSES}", RESPONSE)
    async def create_response() -> Response:
        return await answer(RESPONSES, read, desk, options)

    @route(app, f"POST {COUNT_ENDPOINT}", COUNT)
    async def count_input() -> dict[str, Any]:
        num_tokens = await count_tokens(RESPONSES, read_counted, desk)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    async def read_counted(body: dict[str, Any]) -> CountedPrompt:
        wanted = (
            await read_response(body, visible_to(current_request_context().principal, desk.info), options.max_sequences)
        ).wanted
        return CountedPrompt(wanted.prompts[0], wanted.prompt_param, wanted.unused_fields)

    @route(app, f"GET {RESPONSES}/<response_id>", NOT_STORED)
    @route(app, f"DELETE {RESPONSES}/<response_id>", NOT_STORED)
    @route(app, f"GET {RESPONSES}/<response_id>/input_items", NOT_STORED)
    @route(app, f"POST {RESPONSES}/<response_id>/cancel", NOT_STORED)
    async def find_response(response_id: str) -> Response:
        message = "This server does not store responses, so none can be retrieved, listed, cancelled or deleted."
        raise not_found(message, "response_id", "response_not_stored")


async def read(parsed: ParsedRequest) -> Reply:
    call_ids = CallIds(parsed.request_id, parsed.info.output.has_short_call_ids)
    return ResponseReply(await read_response(parsed.body, parsed.info, parsed.options.max_sequences), call_ids)
