"""The upstreams: passes requests on to other servers.

A request is passed on by the task that its handler starts, which is cancelled when the client leaves: the connection to
the upstream is then closed at once. The accountant is told where it was sent (`Forwarded`), when the answer began
(`Answering`) and what the upstream says that was used (`Answered`), in this order; the client gets the end only when
that is stored. Before the client has got anything, another upstream is tried.

What must always hold: each request that was `Forwarded` is `Answered` once, however it ends; a client that does not
read holds up nobody but its own upstream's connection; no key is logged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress

import attrs
import httpx2
import structlog
import trio

from ..channel import Poster
from ..messages.accountant import Answered, Answering, Forwarded, Refused
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..messages.upstream import ForeignUsage, Forward, ForwardOutlet, UpstreamRefusal
from ..request_desk.desk import RequestDesk
from ..request_desk.passing_on import Placement, UpstreamStatus
from .attempts import (
    MAX_ATTEMPTS,
    MAX_ERROR_BYTES,
    OK,
    Failed,
    check_head,
    failure_of_status,
    headers_for,
    relay_for,
)
from .choosing import Balancer, Chooser, Chosen, FindPrompts, Prompts
from .event_stream import UpstreamGarbage
from .relay import Relay, UpstreamFailure, body_for
from .seats import UpstreamSeat, UpstreamSeats

log = structlog.get_logger()

SLICE_BYTES = 4096
"""What is looked at between two checkpoints: some hundred events, if they are as small as can be."""
REST_S = 0.1
"""How long the end of a response may take after its last event, so that its connection can be used again."""


async def no_prompts(forward: Forward) -> Prompts:
    """Know no tokens of any prompt."""
    await trio.lowlevel.checkpoint()
    return {}


@attrs.define(eq=False)
class _Exchange:
    """One request with one upstream."""

    scope: trio.CancelScope
    heard_at: float
    given_up: str | None = None

    def give_up(self, why: str) -> None:
        self.given_up = why
        self.scope.cancel()


@attrs.define(eq=False)
class _Passing:
    """A request that is being passed on."""

    forward: Forward
    outlet: ForwardOutlet
    relay: Relay | None = None
    """Of the last attempt; None before the first."""
    has_begun: bool = False
    """Its client got something."""
    is_complete: bool = False


class Upstreams:
    """Implements `PassingOn`."""

    def __init__(
        self,
        seats: UpstreamSeats,
        http: httpx2.AsyncClient,
        desk: RequestDesk,
        accountant: Poster[Forwarded | Answering | Answered | Refused],
        chooser: Chooser,
        show: Callable[[UpstreamSeat], object],
        find_prompts: FindPrompts = no_prompts,
        balancer: Balancer | None = None,
    ) -> None:
        """`show(seat)` is called whenever what an upstream is doing has changed.

        `balancer`: where there are engines that may serve the same models.
        """
        self._seats = seats
        self._http = http
        self._desk = desk
        self._accountant = accountant
        self._chooser = chooser
        self._show = show
        self._find_prompts = find_prompts
        self._balancer = balancer

    def serves(self, model: str) -> bool:
        return self._seats.serves(model)

    def place(self, model: str, body: bytes | bytearray, tenant: str) -> Placement:
        assert self._balancer is not None, "there is no engine that serves it"
        return self._balancer.place(self._seats.candidates(model, ()), body, tenant)

    def stands_in(self, models: Collection[str]) -> bool:
        return any(self._seats.candidates(model, ()) for model in models)

    def statuses(self) -> Sequence[UpstreamStatus]:
        return self._seats.statuses()

    # ------------------------------------------------------------ requests

    async def pass_on(self, forward: Forward, outlet: ForwardOutlet) -> None:
        passing = _Passing(forward, outlet)
        with trio.CancelScope() as scope:
            self._desk.when_stopped(forward.request_id, scope.cancel)
            try:
                if (failed := await self._try_upstreams(passing)) is not None:
                    self._fail(passing, failed)
            except Exception:
                log.exception("upstream.crashed", request_id=forward.request_id)
                self._fail(passing, RequestError(ErrorKind.INTERNAL, "The request could not be passed on."))
            finally:
                if passing.relay is not None:
                    self._accountant.post(_answered(forward, passing.relay, is_complete=passing.is_complete))

    async def _try_upstreams(self, passing: _Passing) -> RequestError | None:
        """Have the request answered; return why it is not."""
        forward = passing.forward
        prompts = await self._find_prompts(forward)
        tried: set[int] = set()
        failed: Failed | None = None
        while len(tried) < MAX_ATTEMPTS and (candidates := self._seats.candidates(forward.model, tried)):
            route = self._chooser.route(candidates, len(forward.body), prompts, forward.affinity or None)
            tried.add(route.engine_id)
            passing.outlet.on_routed()
            try:
                failed = await self._attempt(passing, self._seats[route.engine_id], route)
            finally:
                self._chooser.drop(route)
            if failed is None:
                return None
            if passing.has_begun:
                if failed.event is not None:
                    passing.outlet.finish(b"data: " + failed.event + b"\n\n")
                break
        return NOBODY if failed is None else failed.error()

    def _fail(self, passing: _Passing, error: RequestError) -> None:
        fault = Fault.ENGINE_DIED if passing.has_begun else None
        self._accountant.post(Refused(passing.forward.request_id, error, fault))

    async def _attempt(self, passing: _Passing, seat: UpstreamSeat, route: Chosen) -> Failed | None:
        """Send the request to one upstream; return why it has failed."""
        forward = passing.forward
        passing.relay = relay_for(forward, route.estimate, is_continuous=seat.config.continuous_usage)
        self._accountant.post(Forwarded(forward.request_id, seat.engine_id, seat.incarnation, route.estimate))
        with trio.CancelScope() as scope:
            exchange = _Exchange(scope, trio.current_time())
            seat.exchanges[exchange] = None
            self._show(seat)
            try:
                failed = await self._exchange(passing, seat, route, exchange)
            except httpx2.HTTPError as error:
                why = "it cannot be reached" if isinstance(error, httpx2.ConnectError) else "its connection was lost"
                failed = Failed(why, is_unreachable=isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout))
            except UpstreamGarbage as garbage:
                failed = Failed(f"it sent {garbage}")
            except UpstreamFailure as failure:
                failed = Failed(f"it sent {failure}", event=failure.event)
            finally:
                del seat.exchanges[exchange]
                self._show(seat)
        if scope.cancelled_caught:
            failed = Failed(exchange.given_up or "it was given up")
        if failed is not None:
            log.warning("upstream.failed", request_id=forward.request_id, engine_id=seat.engine_id, reason=failed.why)
            if failed.is_unreachable and seat.suspect(failed.why):
                log.warning("upstream.down", engine_id=seat.engine_id, url=seat.url, reason=seat.detail)
        return failed

    async def _exchange(
        self, passing: _Passing, seat: UpstreamSeat, route: Chosen, exchange: _Exchange
    ) -> Failed | None:
        forward, relay = passing.forward, passing.relay
        assert relay is not None
        body = body_for(forward, seat.model_for(forward.model), is_continuous=seat.config.continuous_usage)
        headers = headers_for(seat.config.key, forward.request_id)
        async with self._http.stream("POST", seat.url + forward.path, content=body, headers=headers) as response:
            exchange.heard_at = trio.current_time()
            if (failed := failure_of_status(response.status_code)) is not None:
                return failed
            if response.status_code != OK:
                await self._refuse(passing, response)
                return None
            check_head(forward, response.headers)
            async with parts_of(response) as parts:
                async for part in parts:
                    exchange.heard_at = trio.current_time()
                    for start in range(0, len(part), SLICE_BYTES):
                        if data := relay.feed(part[start : start + SLICE_BYTES]):
                            self._begin(passing, route)
                            await passing.outlet.send(data)
                        await trio.lowlevel.checkpoint()
                    if relay.is_done:
                        break
                with suppress(httpx2.HTTPError), trio.move_on_after(REST_S):
                    async for _ in parts:
                        await trio.lowlevel.checkpoint()
        last = relay.end()
        self._begin(passing, route)
        if relay.usage.problems:
            problems = list(relay.usage.problems)
            log.warning("upstream.impossible_usage", engine_id=seat.engine_id, problems=problems)
        passing.is_complete = True
        passing.outlet.finish(last)
        return None

    def _begin(self, passing: _Passing, route: Chosen) -> None:
        """Note that the client gets something."""
        if not passing.has_begun:
            passing.has_begun = True
            self._chooser.on_answering(route)
            self._accountant.post(Answering(passing.forward.request_id))
            if passing.forward.is_stream:
                passing.outlet.begin()

    async def _refuse(self, passing: _Passing, response: httpx2.Response) -> None:
        """Pass on why an upstream does not serve a request."""
        headers = response.headers
        refusal = UpstreamRefusal(
            response.status_code,
            await read_up_to(response, MAX_ERROR_BYTES),
            headers.get("content-type", "application/json"),
            headers.get("retry-after"),
        )
        passing.outlet.refuse(refusal)
        message = f"The upstream server refused it with status {refusal.status}."
        self._accountant.post(Refused(passing.forward.request_id, RequestError(ErrorKind.INVALID, message)))


NOBODY = RequestError(ErrorKind.OVERLOADED, "No upstream server that serves this model can be reached.")


def _answered(forward: Forward, relay: Relay, *, is_complete: bool) -> Answered:
    usage: ForeignUsage = relay.usage
    return Answered(forward.request_id, usage, relay.ends.finish_reason, relay.ends.num_choices, is_complete)


@asynccontextmanager
async def parts_of(response: httpx2.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """Read a body as it comes, perhaps not to its end.

    The client library reads with generators inside of generators, of which only the outermost could be closed. So the
    next read is cancelled, which ends them all.
    """
    parts = response.aiter_raw()
    try:
        yield parts
    finally:
        with suppress(httpx2.HTTPError), trio.CancelScope() as scope:
            scope.cancel()
            async for _ in parts:
                pass  # the generators have to be cancelled, not this loop


async def read_up_to(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return the beginning of a body."""
    body = bytearray()
    async with parts_of(response) as parts:
        async for part in parts:
            await trio.lowlevel.checkpoint()  # parts that have come already are read without one
            body += part[: max_bytes - len(body)]
            if len(body) >= max_bytes:
                break
    return bytes(body)
