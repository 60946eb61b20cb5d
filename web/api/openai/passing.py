"""Requests that are passed on to another server: the client's side of `actors/fleet/upstreams/`.

The body goes on as it came. Only what this server decides by is checked: the model, whether the answer is a stream, and
whether its client is to see usage.

What must always hold: the last bytes of a response are sent after its usage record is stored; the upstream is slowed
down to what its client reads; a stream's client hears something in time, whatever its upstream does.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import attrs
import orjson
import trio
from quart import Response

from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind
from quipu.actors.messages.prompts import Prompt
from quipu.actors.messages.upstream import Forward, UpstreamRefusal
from quipu.actors.request_desk.interface import Desk, Placement, ServingInfo

from ...auth.caller import caller_of
from ...http.sse import DONE, PING, Sink
from ...options import AppOptions
from ...request.batch_line import RenderedAnswer
from ...request.errors import APIError, error_of, no_streams, raise_error_of
from ...request.request_context import current_request_context, note_error
from ..answer import ReceivedBody, open_request, open_sink, stream_response
from ..body_table import PORTABLE
from ..declared_body import Body
from ..generation import GenerationRequest, affinity_of, read_affinity_key
from ..request_reader import AFFINITY_FIELDS
from ..stream import Stream, StreamWriter

ReadPrompt = Callable[[dict[str, Any], ServingInfo, int], Awaitable[GenerationRequest]]
"""Reads a body as for an engine of this server."""
MAX_VOCABULARY = 2**31
MAX_CONTEXT = 1 << 20
"""Tokens of a prompt for which there is an estimate."""
_PORTABLE_OPTIONS = frozenset({"include_obfuscation", "include_usage"})


@attrs.frozen
class ForwardedRoute:
    """Implements `answer.PassOn` for one endpoint."""

    endpoint: str
    desk: Desk
    options: AppOptions
    read_prompt: ReadPrompt
    """Used if it is known what upstreams have cached."""

    def is_portable(self, body: dict[str, Any]) -> bool:
        if not body.keys() <= PORTABLE or type(body.get("prompt", "")) is not str:
            return False
        options = body.get("stream_options") or {}
        return isinstance(options, dict) and options.keys() <= _PORTABLE_OPTIONS

    async def __call__(self, received: ReceivedBody, placement: Placement | None = None, /) -> Response:
        desk, options, context = self.desk, self.options, current_request_context()
        body, data = received.body, bytes(received.data)
        caller = await caller_of(context, data, str(body["model"]))
        forward = read_forward(context.request_id, self.endpoint, body, data, caller.tenant, options)
        if desk.info.reads_forwards:
            prompts = await _prompts_of(body, desk.info, self.read_prompt, options.max_sequences)
            forward = attrs.evolve(forward, prompts=prompts)
        is_stream = forward.is_stream
        if is_stream and context.line is not None:
            raise no_streams()
        traced = attrs.evolve(context.traced, model=forward.model, is_streamed=is_stream)
        ticket = open_request(forward, self.endpoint, caller, desk, options, traced, context)
        sink = open_sink(context, options)
        outlet = PassedOn(Stream(sink, context.tally, context.log), sink, placement)
        if context.line is not None:
            context.line.render = outlet.render
        ticket.mailbox.attach(outlet.consume)
        context.scope.start_soon(ticket.pass_on, outlet)
        del forward, received, body, data
        with trio.move_on_after(options.heartbeat_s if is_stream else math.inf):
            await outlet.begun.wait()
        if not outlet.begun.is_set():
            outlet.begin_early()
        if outlet.closed is None:
            return stream_response(outlet.sink, PING, context, options)
        if outlet.refusal is not None:
            return refused(outlet.refusal)
        raise_error_of(outlet.closed)
        return Response(outlet.last, content_type="application/json")


async def _prompts_of(
    body: dict[str, Any], info: ServingInfo, read: ReadPrompt, max_sequences: int
) -> tuple[Prompt, ...]:
    """Return a request's prompts for an estimate, or none if they are salted or cannot be read here."""
    if body.get("cache_salt"):
        return ()
    as_ours = attrs.evolve(
        info,
        model_names=(str(body["model"]),),
        passed_on={},
        shared=frozenset(),
        has_engines=True,
        vocab_size=MAX_VOCABULARY,
        max_model_len=MAX_CONTEXT,
    )
    try:
        return (await read(body, as_ours, max_sequences)).prompts
    except APIError:
        return ()


def read_forward(
    request_id: str, endpoint: str, body: dict[str, Any], data: bytes, tenant: str, options: AppOptions
) -> Forward:
    """Return what is passed on. Raises APIError."""
    fields = Body(body, endpoint)
    stream_options = fields.fields("stream_options")
    asks_usage = stream_options.flag("include_usage")
    return Forward(
        request_id=request_id,
        path=endpoint,
        model=fields.text("model"),
        body=data,
        is_stream=fields.flag("stream"),
        shows_usage=asks_usage or options.always_include_usage,
        asks_usage=asks_usage,
        asks_continuous=asks_usage and stream_options.flag("continuous_usage_stats"),
        has_one_choice=body.get("n") in (None, 1) and not isinstance(body.get("prompt"), list),
        has_stream_options="stream_options" in body,
        asks_details=fields.flag("return_cached_tokens_details"),
        is_timed=options.request_timeout_s is not None,
        tenant=tenant,
        affinity=affinity_of(tenant, read_affinity_key(fields, *AFFINITY_FIELDS)),
    )


def refused(refusal: UpstreamRefusal) -> Response:
    """Return an upstream's refusal as it came."""
    note_error("upstream_refused", None)
    response = Response(refusal.body, status=refusal.status, content_type=refusal.content_type)
    if refusal.retry_after is not None:
        response.headers["Retry-After"] = refusal.retry_after
    return response


def _json_of(refusal: UpstreamRefusal) -> bytes:
    """Return a refusal's body where nothing but JSON can stand: as it came, or else as an error's message."""
    try:
        orjson.loads(refusal.body)
    except orjson.JSONDecodeError:
        said = refusal.body.decode("utf-8", "replace")
        return APIError(refusal.status, said, "invalid_request_error", code="upstream_refused").body()
    return refusal.body


class PassedOn(StreamWriter):
    """Takes an upstream's answer and, at the end, the request's record. Implements `ForwardOutlet`."""

    def __init__(self, stream: Stream, sink: Sink, placement: Placement | None) -> None:
        """`sink`: that of the stream."""
        super().__init__(stream)
        self.sink = sink
        self._placement = placement
        self.begun = trio.Event()
        """Set when a stream begins, or the request has ended before one began."""
        self.last = b""
        self.upstreams_error = b""
        """What ends a stream if the upstream fails, in its own words."""
        self.refusal: UpstreamRefusal | None = None
        self.closed: Closed | None = None
        """Set if the request has ended before a stream began."""
        self._streams = False

    def on_routed(self) -> None:
        if self._placement is not None:
            self._placement.on_routed()

    def begin(self) -> None:
        self._streams = True
        self.begun.set()

    def begin_early(self) -> None:
        """Begin the stream before its first byte, since proxies end connections on which nothing is sent."""
        self.begin()
        self.sink.push(PING)

    async def send(self, data: bytes) -> None:
        self.sink.push(data)
        await self.sink.wait_room()

    def finish(self, last: bytes) -> None:
        self.last = last

    def end_with(self, error: bytes) -> None:
        self.upstreams_error = error

    def refuse(self, refusal: UpstreamRefusal) -> None:
        self.refusal = refusal

    def render(self, closed: Closed) -> RenderedAnswer:
        """Make the answer of a line of a batch."""
        if self.refusal is not None:
            return RenderedAnswer(self.refusal.status, iter([_json_of(self.refusal)]))
        raise_error_of(closed)
        return RenderedAnswer(HTTPStatus.OK, iter([self.last.decode("utf-8", "replace").encode()]))

    def _consume_one(self, event: OutletEvent) -> None:
        if not isinstance(event, Closed):
            return
        if not self._streams:
            self.closed = event
            self.begun.set()
            return
        error = error_of(event)
        if error is None:
            self._end(self.last)
        elif self.upstreams_error and event.error is not None and event.error.kind is ErrorKind.UPSTREAM:
            self._end(self.upstreams_error + DONE)
        else:
            self._fail(error)

    def _fail(self, error: APIError) -> None:
        self._end(b"data: " + error.body() + b"\n\n" + DONE)
