"""Probes of the upstreams: which of them answer, and which models they serve.

Run from `wiring` and `front.py`, next to the actor that passes requests on (`upstreams/actor.py`).

What must always hold: what one upstream does delays no probe of another; no key is logged.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import structlog
import trio

from .upstreams.actor import read_up_to
from .upstreams.attempts import FORBIDDEN, OK, UNAUTHORIZED, headers_for
from .upstreams.seats import UpstreamSeat, UpstreamSeats

log = structlog.get_logger()

CONNECT_S = 5.0
"""How long a connection may take to be made."""
SEND_S = 30.0
"""How long an upstream may take to read a part of a request."""
KEEPALIVE_S = 2.0
"""Shorter than servers keep idle connections, so that no request is sent on one that is being closed."""
MAX_IDLE_CONNECTIONS = 256
PROBE_TIMEOUT_S = 3.0
FIRST_PROBES_S = 2.0
"""How long the start waits for the upstreams' first answers."""
MAX_PROBE_BYTES = 1 << 20
SILENCE_S = 30.0
"""After which an answer is given up if its upstream does not answer probes either."""


def make_http() -> httpx2.AsyncClient:
    """Return the client of all upstreams: a connection for each request that is running, some kept for the next."""
    return httpx2.AsyncClient(
        verify=httpx2.create_ssl_context(),  # of the environment, SSL_CERT_FILE and SSL_CERT_DIR count, proxies do not
        # compression would make an upstream buffer what it should send at once
        headers={"Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(None, connect=CONNECT_S, write=SEND_S),
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
        ),
        trust_env=False,
    )


class UpstreamProbes:
    def __init__(
        self,
        seats: UpstreamSeats,
        http: httpx2.AsyncClient,
        show: Callable[[UpstreamSeat], object],
    ) -> None:
        """`show(seat)` is called after each probe."""
        self._seats = seats
        self._http = http
        self._show = show

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe until cancelled. Started once each upstream has answered, or has had time to."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(FIRST_PROBES_S):
                async with trio.open_nursery() as first:
                    for seat in self._seats:
                        first.start_soon(self._probe, seat)
            for seat in self._seats:
                nursery.start_soon(self._keep_probing, seat)
            task_status.started()

    async def _keep_probing(self, seat: UpstreamSeat) -> None:
        while True:
            woken = trio.Event()
            seat.wake = woken.set
            with trio.move_on_after(seat.probe_in_s()):
                await woken.wait()
                await trio.sleep(seat.probe_in_s())
            await self._probe(seat)

    async def _probe(self, seat: UpstreamSeat) -> None:
        """Find out whether an upstream answers, and which models it has."""
        why: str | None = "it does not answer"
        with trio.move_on_after(PROBE_TIMEOUT_S):
            try:
                why = await self._ask(seat)
            except httpx2.HTTPError as error:
                why = f"it cannot be reached ({type(error).__name__})"
        if why is None:
            if seat.note_alive():
                log.info("upstream.ready", engine_id=seat.engine_id, url=seat.url, models=list(seat.models))
        else:
            if seat.note_failed(why) or seat.num_probes_failed == 1:
                log.warning("upstream.down", engine_id=seat.engine_id, url=seat.url, reason=why)
            for exchange in seat.silent_since(trio.current_time() - SILENCE_S):
                exchange.give_up("it has gone silent")
        self._show(seat)

    async def _ask(self, seat: UpstreamSeat) -> str | None:
        """Probe an upstream; return what is wrong with it."""
        headers = headers_for(seat.config.key, "probe")
        async with self._http.stream("GET", f"{seat.url}/health", headers=headers) as response:
            if response.status_code >= 500:
                return f"it says that it is not healthy (status {response.status_code})"
        async with self._http.stream("GET", f"{seat.url}/v1/models", headers=headers) as response:
            if response.status_code in (UNAUTHORIZED, FORBIDDEN):
                return "it does not accept this server's key"
            if response.status_code == OK:
                seat.read_models(await read_up_to(response, MAX_PROBE_BYTES))
        return None
