"""The life of one generation request over HTTP, the same for both endpoints.

Check the body, open a ticket at the front desk, hang its release on the request's scope, wait for the first event (so
that early errors have their own status), then answer whole or as a stream. Registered by `install_openai`.

What must always hold: between `desk.open` and `on_close(ticket.leave)` there is no checkpoint; nothing else releases
a ticket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.front import DeskClosed, FrontDesk, ServingInfo, Ticket
from quipu.actors.mailbox import Mailbox
from quipu.actors.messages import Closed, FinishReason
from quipu.web import sse
from quipu.web.errors import error_of, unavailable
from quipu.web.openai import chat, completions
from quipu.web.openai.fields import parse_object
from quipu.web.openai.generation import GenerationRequest
from quipu.web.openai.render import ChunkWriter, Envelope, Transcript
from quipu.web.options import AppOptions
from quipu.web.usage import openai_usage
from quipu.web.visit import Visit, current_visit


@attrs.frozen
class Dialect:
    """Where the two endpoints differ."""

    endpoint: str
    id_prefix: str
    object_name: str
    read: Callable[[dict[str, Any], ServingInfo, int], GenerationRequest]
    choice: Callable[[int, str, FinishReason | None], dict[str, Any]]
    writer: type[ChunkWriter]


COMPLETIONS = Dialect(
    endpoint=completions.ENDPOINT,
    id_prefix=completions.ID_PREFIX,
    object_name=completions.OBJECT_NAME,
    read=completions.read_completion,
    choice=completions.completion_choice,
    writer=completions.CompletionWriter,
)
CHAT = Dialect(
    endpoint=chat.ENDPOINT,
    id_prefix=chat.ID_PREFIX,
    object_name=chat.OBJECT_NAME,
    read=chat.read_chat,
    choice=chat.chat_choice,
    writer=chat.ChatWriter,
)


def install_openai(app: QuartTrio, desk: FrontDesk, options: AppOptions) -> None:
    """Register both endpoints."""

    @app.post(COMPLETIONS.endpoint)
    async def create_completion() -> Response:
        return await _generate(COMPLETIONS, desk, options)

    @app.post(CHAT.endpoint)
    async def create_chat_completion() -> Response:
        return await _generate(CHAT, desk, options)


async def _generate(dialect: Dialect, desk: FrontDesk, options: AppOptions) -> Response:
    visit = current_visit()
    visit.is_generation = True
    body = parse_object(await request.get_data(False, False, False))
    wanted = dialect.read(body, desk.info, options.max_sequences)
    try:
        ticket = desk.open(wanted.encode(visit.request_id, options.domain), dialect.endpoint)
    except DeskClosed as closed:
        raise unavailable(str(closed) or "The server takes no requests now.") from None
    visit.scope.on_close(ticket.leave)
    mailbox = visit.mailbox = ticket.mailbox
    if options.request_timeout_s is not None:
        visit.scope.nursery.start_soon(_expire, ticket, options.request_timeout_s)
    await ticket.start()
    envelope = Envelope(dialect.id_prefix + visit.request_id, int(time.time()), wanted.model)
    if wanted.delivery.stream:
        return await _answer_streamed(dialect, wanted, envelope, mailbox, visit, options)
    return await _answer_whole(dialect, wanted, envelope, mailbox, visit)


async def _expire(ticket: Ticket, after_s: float) -> None:
    """End a request at its deadline; its scope cancels this when it ends before."""
    await trio.sleep(after_s)
    ticket.expire(after_s)


async def _answer_whole(
    dialect: Dialect, wanted: GenerationRequest, envelope: Envelope, mailbox: Mailbox, visit: Visit
) -> Response:
    transcript = Transcript(visit.tally)
    mailbox.attach(transcript.consume)
    closed = await transcript.wait_closed()
    error = error_of(closed)
    if error is not None:
        raise error
    answer = envelope.fields(dialect.object_name)
    answer["choices"] = [
        dialect.choice(index, transcript.text(index), transcript.finish_reasons.get(index))
        for index in range(wanted.num_sequences)
    ]
    answer["usage"] = openai_usage(closed.record, with_tiers=wanted.delivery.with_tiers)
    return Response(orjson.dumps(answer), content_type="application/json")


async def _answer_streamed(
    dialect: Dialect,
    wanted: GenerationRequest,
    envelope: Envelope,
    mailbox: Mailbox,
    visit: Visit,
    options: AppOptions,
) -> Response:
    # Until something has come, the request may still be refused with a status of its own.
    first = await mailbox.peek()
    if isinstance(first, Closed):
        error = error_of(first)
        if error is not None:
            raise error
    delivery = wanted.delivery
    if options.always_include_usage:
        delivery = attrs.evolve(delivery, include_usage=True)
    sink = visit.sink = sse.Sink(options.sink_limit_bytes, visit.cut)
    writer = dialect.writer(sink, envelope, delivery, visit.tally, visit.log)
    mailbox.attach(writer.consume)
    response = Response(sse.body(sink, options.heartbeat_s), content_type=sse.CONTENT_TYPE, headers=dict(sse.HEADERS))
    response.timeout = None
    return response
