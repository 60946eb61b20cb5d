"""The upstreams: forwards requests to other servers.

A request is forwarded by the task that its handler starts, which is cancelled when the client leaves: the connection to
the upstream is then closed at once. The accountant is told where the request was sent (`Forwarded`), when the answer
began (`Answering`) and the usage that the upstream reports (`Answered`), in this order; the client gets the end of the
response only once that is stored. As long as the client has received nothing, another upstream may be tried.

What must always hold: each request that was `Forwarded` is `Answered` once, however it ends; a client that does not
read holds up only its own upstream connection; no key is logged.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import attrs
import structlog
import trio

from ...channel import Poster
from ...messages.accountant import Answered, Answering, Forwarded, Refused
from ...messages.outcomes import ErrorKind, Fault, RequestError
from ...messages.upstream import Forward, ForwardOutlet, UpstreamUsage
from ...request_desk.interface import Placement
from ...request_desk.upstream_pool import Exchange, Upstream, UpstreamPool
from ...router.balance import Balance
from ...router.upstream_routing import PromptKeys, UpstreamRoute, UpstreamRouting
from ..upstream_http.upstream_client import UpstreamClient
from ..upstream_http.upstream_connection import Response
from ..upstream_http.upstream_errors import OwnShortage, UpstreamError
from .attempts import (
    MAX_ATTEMPTS,
    MAX_ERROR_BYTES,
    OK,
    TOO_MANY,
    Failed,
    check_head,
    failure_of_status,
    headers_for,
    refusal_of,
    relay_for,
)
from .event_stream import UpstreamGarbage
from .relay import Relay, UpstreamFailure, body_for, reading

log = structlog.get_logger()

SLICE_BYTES = 4096
"""Bytes processed between two checkpoints: some hundred events of the smallest size."""
NOBODY = RequestError(ErrorKind.OVERLOADED, "No upstream server that serves this model can be reached.")
FindPrompts = Callable[[Forward], Awaitable[Mapping[int, PromptKeys]]]
"""Returns the block keys of a request's prompt for each upstream whose way of cutting blocks is known."""
REST_S = 0.1
"""How long to wait for the end of a response after its last event, so that its connection can be reused."""


@attrs.define(eq=False)
class _Passing:
    """A request that is being forwarded."""

    forward: Forward
    outlet: ForwardOutlet
    relay: Relay | None = None
    """The relay of the last attempt; None before the first."""
    is_open: bool = False
    """Whether its client got the head of a stream, and perhaps comments."""
    has_begun: bool = False
    """Whether its client got a part of an answer."""
    is_complete: bool = False


class Upstreams:
    """Implements `Forwarding`."""

    def __init__(
        self,
        pool: UpstreamPool,
        http: UpstreamClient,
        accountant: Poster[Forwarded | Answering | Answered | Refused],
        routing: UpstreamRouting,
        show: Callable[[Upstream], object],
        find_prompts: FindPrompts,
        balance: Balance,
    ) -> None:
        """`show(upstream)` is called whenever the state of an upstream has changed."""
        self.pool = pool
        self._http = http
        self._accountant = accountant
        self._routing = routing
        self._show = show
        self._find_prompts = find_prompts
        self._balance = balance

    def place(self, model: str, body: bytes | bytearray, tenant: str) -> Placement:
        return self._balance.place(self.pool.candidates(model, ()), body, tenant)

    # ------------------------------------------------------------ requests

    async def pass_on(self, forward: Forward, outlet: ForwardOutlet) -> None:
        passing = _Passing(forward, outlet)
        try:
            if (failed := await self._try_upstreams(passing)) is not None:
                self._fail(passing, failed)
        except Exception:
            log.exception("upstream.crashed", request_id=forward.request_id)
            self._fail(passing, RequestError(ErrorKind.INTERNAL, "The request could not be passed on."))
        finally:
            if (relay := passing.relay) is not None:
                reason, num_choices = relay.ends.finish_reason, relay.ends.num_choices
                usage = relay.usage if passing.has_begun else UpstreamUsage()  # of what nobody got, nothing counts
                self._accountant.post(
                    Answered(forward.request_id, usage, reason, num_choices, is_complete=passing.is_complete)
                )

    async def _try_upstreams(self, passing: _Passing) -> RequestError | None:
        """Have the request answered; return the error if no upstream answers it."""
        forward = passing.forward
        prompts = await self._find_prompts(forward)
        tried: set[int] = set()
        failed: Failed | None = None
        while len(tried) < MAX_ATTEMPTS and (candidates := self.pool.candidates(forward.model, tried)):
            route = self._routing.route(candidates, len(forward.body), prompts, forward.affinity or None)
            tried.add(route.engine_id)
            passing.outlet.on_routed()
            try:
                failed = await self._attempt(passing, self.pool[route.engine_id], route)
            finally:
                self._routing.drop(route)
            if failed is None:
                return None
            if passing.has_begun:
                if failed.event is not None:
                    passing.outlet.end_with(b"data: " + failed.event + b"\n\n")
                break
            if failed.is_ours:
                break
        return NOBODY if failed is None else failed.error()

    def _fail(self, passing: _Passing, error: RequestError) -> None:
        fault = Fault.ENGINE_DIED if passing.has_begun else None
        self._accountant.post(Refused(passing.forward.request_id, error, fault))

    async def _attempt(self, passing: _Passing, upstream: Upstream, route: UpstreamRoute) -> Failed | None:
        """Send the request to one upstream; return the failure, if it fails."""
        forward = passing.forward
        passing.relay = relay_for(forward, route.estimate, is_continuous=upstream.config.continuous_usage)
        self._accountant.post(
            Forwarded(forward.request_id, upstream.engine_id, upstream.health.incarnation, route.estimate)
        )
        with trio.CancelScope() as scope:
            exchange = Exchange(scope, trio.current_time(), forward.is_timed)
            upstream.exchanges[exchange] = None
            self._show(upstream)
            try:
                failed = await self._exchange(passing, upstream, route, exchange)
            except UpstreamError as error:
                failed = Failed(str(error), is_unreachable=error.is_unreachable)
            except OwnShortage as shortage:
                failed = Failed(str(shortage), is_ours=True)
            except UpstreamGarbage as garbage:
                failed = Failed(f"it sent {garbage}")
            except UpstreamFailure as failure:
                failed = Failed(f"it sent {failure}", event=failure.event)
            finally:
                del upstream.exchanges[exchange]
                self._show(upstream)
        if scope.cancelled_caught:
            failed = Failed(exchange.given_up or "it was given up")
        if failed is not None:
            log.warning(
                "upstream.failed", request_id=forward.request_id, engine_id=upstream.engine_id, reason=failed.why
            )
            if failed.is_unreachable and upstream.suspect(failed.why):
                log.warning(
                    "upstream.down", engine_id=upstream.engine_id, url=upstream.url, reason=upstream.health.detail
                )
        return failed

    async def _exchange(
        self, passing: _Passing, upstream: Upstream, route: UpstreamRoute, exchange: Exchange
    ) -> Failed | None:
        forward, relay = passing.forward, passing.relay
        assert relay is not None
        body = body_for(forward, upstream.model_for(forward.model), is_continuous=upstream.config.continuous_usage)
        headers = headers_for(upstream.config.key, forward.request_id)
        async with self._http.ask("POST", upstream.url + forward.path, headers, body) as response:
            exchange.heard_at = trio.current_time()
            if (failed := failure_of_status(response.status)) is not None:
                return failed
            if response.status != OK:
                await self._refuse(passing, response)
                return None
            check_head(forward, response.headers)
            while not relay.is_done and (part := await response.receive()):
                for start in range(0, len(part), SLICE_BYTES):
                    with reading():
                        data = relay.feed(part[start : start + SLICE_BYTES])
                    await self._relay(passing, route, exchange, data)
                exchange.heard_at = trio.current_time()
            with suppress(UpstreamError, OwnShortage), trio.move_on_after(REST_S):
                while await response.receive():
                    await trio.lowlevel.checkpoint()
        with reading():
            last = relay.end()
        self._begin(passing, route)
        if relay.usage.problems:
            problems = list(relay.usage.problems)
            log.warning("upstream.impossible_usage", engine_id=upstream.engine_id, problems=problems)
        passing.is_complete = True
        passing.outlet.finish(last)
        return None

    async def _relay(self, passing: _Passing, route: UpstreamRoute, exchange: Exchange, data: bytes) -> None:
        """Send a part of a stream."""
        if data:
            self._open(passing)
            if passing.relay is not None and passing.relay.has_begun:
                self._begin(passing, route)
            exchange.heard_at = math.inf  # while the client does not read, the upstream does not count as silent
            await passing.outlet.send(data)
        await trio.lowlevel.checkpoint()

    def _begin(self, passing: _Passing, route: UpstreamRoute) -> None:
        """Note that the client gets a part of an answer."""
        if not passing.has_begun:
            passing.has_begun = True
            self._routing.on_answering(route)
            self._accountant.post(Answering(passing.forward.request_id))
            self._open(passing)

    def _open(self, passing: _Passing) -> None:
        """Begin the response if it is a stream. Until an answer begins, another upstream may still give one."""
        if passing.forward.is_stream and not passing.is_open:
            passing.is_open = True
            passing.outlet.begin()

    async def _refuse(self, passing: _Passing, response: Response) -> None:
        """Send an upstream's refusal to the client."""
        body = await response.read_up_to(MAX_ERROR_BYTES + 1)
        refusal = refusal_of(response.status, response.headers, body)
        passing.outlet.refuse(refusal)
        message = f"The upstream server refused it with status {refusal.status}."
        kind = ErrorKind.OVERLOADED if refusal.status == TOO_MANY else ErrorKind.INVALID
        self._accountant.post(Refused(passing.forward.request_id, RequestError(kind, message)))
