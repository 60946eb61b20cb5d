"""Completions and chat: their differences, and their routes. Registered by `install_openai`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import attrs
import orjson
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config import declarations
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import Desk, ServingInfo

from ...options import AppOptions
from ...request.request_context import current_request_context
from ..answer import ParsedRequest, Reply, answer
from ..content import CallIds
from ..declared_body import Body
from ..generation import GenerationRequest
from ..json_structure import MAX_VALUES
from ..operation import route
from ..pace import Pace
from ..request_reader import read_delivery
from ..stream import Stream, Transcript
from ..usage import openai_usage
from . import chat, chat_response, completions
from .choices_schemas import CHAT_COMPLETION, COMPLETION
from .chunks import ChunkWriter, Envelope, id_pieces
from .logprobs import prompt_logprobs_pieces
from .passing import ForwardedRoute
from .responses_echo import read_metadata
from .store_door import StoreDoor
from .stored_chats import ChatKeeper, message_items


@attrs.frozen
class Dialect:
    """The differences between the two endpoints."""

    endpoint: str
    id_prefix: str
    object_name: str
    read: Callable[[dict[str, Any], ServingInfo, int], Awaitable[GenerationRequest]]
    choice: Callable[[Transcript, int, GenerationRequest, CallIds], Iterator[bytes]]
    writer: type[ChunkWriter]
    has_one_prompt: bool
    """Token ids of the prompt are a field of the response, not of each choice."""


COMPLETIONS = Dialect(
    endpoint=declarations.COMPLETIONS,
    id_prefix="cmpl-",
    object_name=completions.OBJECT_NAME,
    read=completions.read_completion,
    choice=completions.completion_choice,
    writer=completions.CompletionWriter,
    has_one_prompt=False,
)
CHAT = Dialect(
    endpoint=declarations.CHAT,
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    read=chat.read_chat,
    choice=chat_response.chat_choice,
    writer=chat_response.ChatWriter,
    has_one_prompt=True,
)


class ChoicesReply(Reply):
    def __init__(self, dialect: Dialect, wanted: GenerationRequest, parsed: ParsedRequest) -> None:
        super().__init__(wanted, dialect.id_prefix + parsed.request_id)
        self._dialect = dialect
        self._envelope = Envelope(self.answer_id, int(time.time()), wanted.model)
        self._call_ids = CallIds(parsed.request_id, parsed.info.output.has_short_call_ids)

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        yield orjson.dumps(self._envelope.fields(self._dialect.object_name))[:-1] + b',"choices":['
        for index in range(self.wanted.num_sequences):
            if index:
                yield b","
            yield from self._dialect.choice(transcript, index, self.wanted, self._call_ids)
        told = self.wanted.delivery.with_tiers, self.wanted.image_tokens
        yield b'],"usage":' + orjson.dumps(openai_usage(record, with_tiers=told[0], image_tokens=told[1]))
        if self._dialect.has_one_prompt:
            yield from self._about_prompt(transcript)
        yield b"}"

    def _about_prompt(self, transcript: Transcript) -> Iterator[bytes]:
        if self.wanted.scores.prompt is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs_pieces(transcript.of_prompt(0).scores, self.wanted.scores.prompt)
        if self.wanted.with_token_ids:
            yield b',"prompt_token_ids":'
            yield from id_pieces(transcript.of_prompt(0).token_ids or ())

    def writer(self, stream: Stream) -> ChunkWriter:
        return self._dialect.writer(stream, self._envelope, self.wanted, self._call_ids)


@attrs.frozen
class ChatReader:
    """Reads bodies of chats, and has them stored whose clients want that."""

    door: StoreDoor | None = None
    """None: nothing is stored."""

    async def read(self, parsed: ParsedRequest) -> Reply:
        """Return the reply to a body. Raises APIError."""
        reply, fields = await read_chat(parsed), Body(parsed.body, CHAT.endpoint)
        if self.door is None or not fields.flag("store"):
            unused = tuple(name for name in ("store", "metadata") if fields.get(name))
            reply.wanted = attrs.evolve(reply.wanted, unused_fields=(*reply.wanted.unused_fields, *unused))
            return reply
        metadata = read_metadata(fields)
        async with Pace() as pace:
            items = await message_items(fields.get("messages"), reply.answer_id, pace)
        tenant = current_request_context().principal.tenant
        reply.keeper = ChatKeeper(reply, int(time.time()), items, metadata, self.door, tenant)
        return reply


def install_openai(app: QuartTrio, desk: Desk, options: AppOptions, door: StoreDoor | None = None) -> None:
    """Register both endpoints. With a `door`, chat completions may be stored."""
    chats = ChatReader(door)

    @route(app, f"POST {COMPLETIONS.endpoint}", COMPLETION)
    async def create_completion() -> Response:
        passing = ForwardedRoute(COMPLETIONS.endpoint, desk, options, COMPLETIONS.read)
        return await answer(COMPLETIONS.endpoint, read_completion, desk, options, MAX_VALUES, pass_on=passing)

    @route(app, f"POST {CHAT.endpoint}", CHAT_COMPLETION)
    async def create_chat_completion() -> Response:
        passing = ForwardedRoute(CHAT.endpoint, desk, options, CHAT.read)
        return await answer(CHAT.endpoint, chats.read, desk, options, pass_on=passing)


async def _read(dialect: Dialect, parsed: ParsedRequest) -> Reply:
    wanted = await dialect.read(parsed.body, parsed.info, parsed.options.max_sequences)
    delivery = read_delivery(Body(parsed.body, dialect.endpoint))
    if parsed.options.always_include_usage:
        delivery = attrs.evolve(delivery, include_usage=True)
    return ChoicesReply(dialect, attrs.evolve(wanted, delivery=delivery), parsed)


read_completion, read_chat = partial(_read, COMPLETIONS), partial(_read, CHAT)
