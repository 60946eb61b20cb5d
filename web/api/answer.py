"""The life cycle of one generation request over HTTP, the same for every API.

Check the body, open a ticket at the request desk, register its release on the request's scope, wait for the first event
(so that early errors have their own status; a stream waits for one heartbeat interval), then respond as a whole or as a
stream. Each endpoint calls `answer` with a reader of its API, which returns the `Reply` that formats the response.

What must always hold: there is no checkpoint between `desk.open` and `on_close(ticket.leave)`; nothing else releases a
ticket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import attrs
import trio
from quart import Response

from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.upstream import Forward
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import Desk, Placement, ServingInfo, Ticket

from ..auth.caller import caller_of
from ..http import sse
from ..http.unread_limit import unread_limit_of_run
from ..options import AppOptions
from ..request.batch_line import RenderedAnswer
from ..request.errors import no_streams, raise_error_of, unsupported_value
from ..request.request_context import RequestContext, current_request_context
from ..request.tally import Tally
from ..telemetry.tracing import TracedRequest
from .bodies import BodyShare, take_body
from .body_field import Shape
from .body_table import SHAPES
from .fields import parse_object
from .generation import GenerationRequest, check_priority, check_task, visible_to
from .ignored_fields import IgnoredNames, ignored_fields
from .json_structure import MAX_CHAT_VALUES
from .keeping import Keeper, KeptStream
from .request_start import RequestStart
from .stream import Stream, StreamWriter, Transcript
from .whole_response import whole_response


class Reply(ABC):
    """One request that can be served, and how its response is formatted in its API."""

    heartbeat: bytes = sse.PING
    """Sent by an idle stream from time to time."""
    declared: Shape | None = None
    """Its body, if that is not in `body_table.py`."""
    keeps_texts: bool = False
    """Whether it holds texts of the body, whose memory is counted until it is over."""

    def __init__(self, wanted: GenerationRequest, answer_id: str) -> None:
        self.wanted = wanted
        self.answer_id = answer_id
        """In its API."""
        self.ignored = IgnoredNames()
        self.keeper: Keeper | None = None
        """Stores the answer, if the client wants that."""

    @abstractmethod
    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        """Yield the body of a complete response as JSON, in pieces that take about a millisecond each to make."""

    def transcript(self, tally: Tally) -> Transcript:
        """Return what collects a whole response."""
        return Transcript(tally, self.wanted.include_reasoning)

    def writer(self, stream: Stream) -> StreamWriter:
        """Return the writer of a streamed response. Raises TypeError if its endpoint streams none."""
        raise TypeError(f"{type(self).__name__} is not streamed")


@attrs.frozen
class ParsedRequest:
    body: dict[str, Any]
    request_id: str
    info: ServingInfo
    options: AppOptions
    grow: Callable[[int], object]
    """Takes more of the memory for bodies. Raises APIError."""
    tenant: str = ""


@attrs.frozen
class ReceivedBody:
    data: bytes | bytearray
    body: dict[str, Any]
    share: BodyShare
    """Its share of the memory for bodies, released when the prompts are encoded."""


class PassOn(Protocol):
    """Passes requests on to upstream servers."""

    def is_portable(self, body: dict[str, Any]) -> bool:
        """Return whether any server with this API answers a body as engines of this server do."""
        ...

    async def __call__(self, received: ReceivedBody, placement: Placement | None = None, /) -> Response:
        """Serve the current request with an upstream's answer. Raises APIError."""
        ...


Reader = Callable[[ParsedRequest], Awaitable[Reply]]
"""Checks a body. Raises APIError."""


async def answer(
    endpoint: str,
    read: Reader,
    desk: Desk,
    options: AppOptions,
    max_values: int = MAX_CHAT_VALUES,
    pass_on: PassOn | None = None,
) -> Response:
    """Serve the current request, whose body may have `max_values` values. Raises APIError.

    `pass_on` serves models of other servers; a model of both is served by whichever has less to do.
    """
    context = current_request_context()
    context.is_generation = True
    data, share = await take_body()
    received = ReceivedBody(data, await parse_object(data, share.grow, max_values), share)
    placement: Placement | None = None
    if pass_on is not None and type(model := received.body.get("model")) is str:
        if model in desk.info.passed_on:
            return await pass_on(received)
        if model in desk.info.shared and desk.upstreams is not None and pass_on.is_portable(received.body):
            placement = desk.upstreams.place(model, data, context.principal.tenant)
            context.scope.on_close(placement.on_routed)
            if placement.is_passed_on:
                return await pass_on(received, placement)
    reply = await read_reply(endpoint, read, received.body, desk, options, share.grow)
    adapter, own = reply.wanted.adapter or None, desk.info.model_names[0]
    model = str(received.body.get("model") or own)
    caller = await caller_of(context, data, model, adapter, None if adapter is None else own)
    encode = reply.wanted.encode(context.request_id, caller.tenant)
    reply.wanted = reply.wanted.without_prompts()
    del data, received
    traced, keeper = _traced(context, reply), reply.keeper
    if keeper is not None:
        context.scope.on_close(keeper.drop)
        await keeper.begin()
        if (run_apart := keeper.run_apart) is not None:
            return await run_apart(partial(open_request, encode, endpoint, caller, desk, options, traced))
    ticket = open_request(encode, endpoint, caller, desk, options, traced, context)
    del encode  # only its prompts are kept, once and until they are encoded
    if not reply.keeps_texts:
        ticket.when_encoded(share.release)
    context.ignored_fields = lambda: reply.ignored.header(ticket.dropped)
    if placement is not None:
        ticket.when_encoded(placement.on_routed)
    if reply.wanted.delivery.stream:
        return await _answer_streamed(reply, ticket, context, options)
    transcript = reply.transcript(context.tally)
    if context.line is not None:
        context.line.render = partial(_render, reply, transcript)
    ticket.mailbox.attach(transcript.consume)
    await ticket.start()
    closed = await transcript.wait_closed()
    raise_error_of(closed)
    if reply.keeper is not None:
        await reply.keeper.end(transcript, closed)
    return await whole_response(reply.pieces(transcript, closed.record))


async def read_reply(
    endpoint: str,
    read: Reader,
    body: dict[str, Any],
    desk: Desk,
    options: AppOptions,
    grow: Callable[[int], object],
) -> Reply:
    """Read the body of the current request as an endpoint does. Raises APIError."""
    context = current_request_context()
    info = visible_to(context.principal, desk.info)
    check_task(endpoint, info)
    reply = await read(ParsedRequest(body, context.request_id, info, options, grow, context.principal.tenant))
    reply.wanted = with_adapter(reply.wanted, info)
    reply.ignored = await ignored_fields(body, reply.declared or SHAPES[endpoint], reply.wanted.unused_fields)
    context.ignored_fields = reply.ignored.header
    if context.line is not None:
        if reply.wanted.delivery.stream:
            raise no_streams()
        if reply.keeper is not None and reply.keeper.run_apart is not None:
            raise unsupported_value("background", "lines of a batch have nobody who waits in any case")
        reply.wanted = attrs.evolve(reply.wanted, is_batch=True)
    check_priority(reply.wanted.priority, is_allowed=options.allow_client_priority or context.principal.may_prioritize)
    return reply


def with_adapter(wanted: GenerationRequest, info: ServingInfo) -> GenerationRequest:
    """Return a request with the digest of the adapter that its model names, if it names one."""
    adapter = info.adapters.get(wanted.model)
    return wanted if adapter is None else attrs.evolve(wanted, adapter=adapter.digest)


def open_request(
    request: Encode | Forward,
    endpoint: str,
    caller: Caller,
    desk: Desk,
    options: AppOptions,
    traced: TracedRequest,
    context: RequestContext,
) -> Ticket:
    """Open a request, which the scope of its context leaves, and which ends at its deadline. Raises DeskClosed."""
    if context.line is None:
        ticket = desk.open(request, endpoint, caller)
    else:
        ticket = desk.open(request, endpoint, caller, context.line.keep)
    context.scope.on_close(ticket.leave)
    context.mailbox = ticket.mailbox
    ticket.mailbox.when_closed(partial(context.account_closed, traced))
    if options.request_timeout_s is not None:
        context.scope.start_soon(_expire, ticket, options.request_timeout_s)
    return ticket


def _traced(context: RequestContext, reply: Reply) -> TracedRequest:
    wanted = reply.wanted
    return attrs.evolve(
        context.traced,
        model=wanted.model,
        response_id=reply.answer_id,
        max_tokens=wanted.max_tokens,
        temperature=wanted.sampling.temperature,
        top_p=wanted.sampling.top_p,
        num_choices=wanted.num_choices,
        is_streamed=wanted.delivery.stream,
    )


async def _expire(ticket: Ticket, after_s: float) -> None:
    """End a request at its deadline. Its scope cancels this task when the request ends before."""
    await trio.sleep(after_s)
    ticket.expire(after_s)


def _render(reply: Reply, transcript: Transcript, closed: Closed) -> RenderedAnswer:
    raise_error_of(closed)
    return RenderedAnswer(HTTPStatus.OK, reply.pieces(transcript, closed.record))


async def _answer_streamed(reply: Reply, ticket: Ticket, context: RequestContext, options: AppOptions) -> Response:
    # Until the first event, the request may still be refused with a status of its own. But proxies close connections
    # on which nothing is sent.
    mailbox = ticket.mailbox
    first: OutletEvent | None = None
    with trio.move_on_after(options.heartbeat_s) as waiting:
        start = RequestStart(ticket, waiting.cancel)
        context.scope.start_soon(start.run)
        first = await mailbox.peek()
    if start.error is not None:
        raise start.error
    if isinstance(first, Closed):
        raise_error_of(first)
    sink = open_sink(context, options)
    if first is None:
        sink.push(reply.heartbeat)
    writer = start.writer = reply.writer(Stream(sink, context.tally, context.log))
    keeper = reply.keeper
    consumer = writer if keeper is None else KeptStream(writer, keeper, reply.transcript(Tally()))
    mailbox.attach(consumer.consume)
    return stream_response(sink, reply.heartbeat, context, options)


def open_sink(context: RequestContext, options: AppOptions) -> sse.Sink:
    """Return the sink of the current request's stream."""
    unread_limit = unread_limit_of_run(options.all_sinks_limit_bytes)
    sink = context.sink = sse.Sink(options.sink_limit_bytes, context.cut, unread_limit)
    context.scope.on_close(sink.close)
    return sink


def stream_response(sink: sse.Sink, heartbeat: bytes, context: RequestContext, options: AppOptions) -> Response:
    """Return the response that drains a sink."""
    connection = context.connection if options.direct_streams else None
    open_direct_writer = None if connection is None else connection.open_direct_writer
    body = sse.body(sink, options.heartbeat_s, heartbeat, open_direct_writer)
    response = Response(body, content_type=sse.CONTENT_TYPE, headers=dict(sse.HEADERS))
    response.timeout = None
    return response
