"""The routes of `/v1/messages` and `/v1/messages/count_tokens`. Registered by `install_anthropic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import MESSAGES
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ...request.errors import speaks_anthropic
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..content import CallIds
from ..counting import CountedPrompt, count_tokens
from ..generation import GenerationRequest, visible_to
from ..operation import route
from ..stream import Stream, Transcript
from .answer_schemas import COUNT, MESSAGE
from .body import read_count, read_messages_request
from .message import PING, MessageWriter, whole_message

COUNT_ENDPOINT = "/v1/messages/count_tokens"
REQUEST_ID_HEADER = "request-id"


class MessageReply(Reply):
    heartbeat = PING

    def __init__(self, wanted: GenerationRequest, call_ids: CallIds) -> None:
        super().__init__(wanted, f"msg_{call_ids.request_id}")
        self._call_ids = call_ids

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        return whole_message(self.answer_id, self.wanted, transcript, record, self._call_ids)

    def writer(self, stream: Stream) -> MessageWriter:
        return MessageWriter(stream, self.answer_id, self.wanted, self._call_ids)


def install_anthropic(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register both endpoints."""

    @route(app, f"POST {MESSAGES}", MESSAGE)
    async def create_message() -> Response:
        return await answer(MESSAGES, read_message, desk, options)

    @route(app, f"POST {COUNT_ENDPOINT}", COUNT)
    async def count_message() -> dict[str, int]:
        return {"input_tokens": await count_tokens(MESSAGES, read, desk)}

    async def read(body: dict[str, Any], _: object) -> CountedPrompt:
        asked = await read_count(body, visible_to(current_request_context().principal, desk.info), options)
        return CountedPrompt(asked.chat, "messages", asked.unused_fields)

    @app.after_request
    async def name_response(response: Response) -> Response:
        if speaks_anthropic():
            response.headers[REQUEST_ID_HEADER] = current_request_context().request_id
        return response


async def read_message(parsed: ParsedRequest) -> Reply:
    call_ids = CallIds(parsed.request_id, parsed.info.output.has_short_call_ids)
    return MessageReply(await read_messages_request(parsed.body, parsed.info, parsed.options), call_ids)
