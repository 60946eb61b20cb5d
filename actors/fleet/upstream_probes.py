"""Probes of the upstreams: which of them answer, and which models they serve.

Run from `wiring` and `upstream_wiring.py`, next to the actor that passes requests on (`upstreams/actor.py`).

What must always hold: what one upstream does, and whatever it sends, neither ends nor delays a probe of another; no key
is logged; a shortage on this machine takes no upstream out of use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
import trio

from ..request_desk.upstream_pool import Upstream, UpstreamPool
from ..threads import outlive_shortages
from .upstream_http.upstream_client import UpstreamClient
from .upstream_http.upstream_errors import OwnShortage, UpstreamError
from .upstreams.attempts import FORBIDDEN, OK, UNAUTHORIZED, headers_for

log = structlog.get_logger()

PROBE_TIMEOUT_S = 3.0
FIRST_PROBES_S = 2.0
"""How long the start waits for the upstreams' first answers."""
MAX_PROBE_BYTES = 1 << 20
MAX_HEALTH_BYTES = 64 * 1024
HEALTH_BODY_S = 0.1
"""What is read of an answer of `/health`, and for how long, so that its connection can be used again."""
SILENCE_S = 30.0
"""After which an answer is given up if its upstream does not answer probes either..."""
MAX_SILENCE_S = 600.0
"""...and if it does, for requests that have no deadline of their own."""


class UpstreamProbes:
    def __init__(
        self,
        pool: UpstreamPool,
        http: UpstreamClient,
        show: Callable[[Upstream], object],
    ) -> None:
        """`show(upstream)` is called after each probe."""
        self._pool = pool
        self._http = http
        self._show = show

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe until cancelled. Started once each upstream has answered, or has had time to."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(FIRST_PROBES_S):
                async with trio.open_nursery() as first:
                    for upstream in self._pool:
                        first.start_soon(self._probe, upstream)
            for upstream in self._pool:
                nursery.start_soon(outlive_shortages, partial(self._keep_probing, upstream), "upstream probes")
            task_status.started()

    async def _keep_probing(self, upstream: Upstream) -> None:
        while True:
            woken = trio.Event()
            upstream.wake = woken.set
            with trio.move_on_after(upstream.probe_in_s()):
                await woken.wait()
                await trio.sleep(upstream.probe_in_s())
            await self._probe(upstream)

    async def _probe(self, upstream: Upstream) -> None:
        """Find out whether an upstream answers, and which models it has."""
        why: str | None = "it does not answer"
        with trio.move_on_after(PROBE_TIMEOUT_S):
            try:
                why = await self._ask(upstream)
            except UpstreamError as error:
                why = str(error)
            except OwnShortage as shortage:
                log.warning("upstream.not_probed", engine_id=upstream.engine_id, reason=str(shortage))
                return
            except Exception:
                log.exception("upstream.probe_crashed", engine_id=upstream.engine_id)
                why = "it answers probes with what cannot be read"
        if why is None:
            if upstream.note_alive():
                log.info("upstream.ready", engine_id=upstream.engine_id, url=upstream.url, models=list(upstream.models))
        else:
            if upstream.note_failed(why) or upstream.num_probes_failed == 1:
                log.warning("upstream.down", engine_id=upstream.engine_id, url=upstream.url, reason=why)
            for exchange in upstream.silent_since(trio.current_time() - SILENCE_S):
                exchange.give_up("it has gone silent")
        for exchange in upstream.silent_since(trio.current_time() - MAX_SILENCE_S):
            if not exchange.is_timed:
                exchange.give_up("it has sent nothing for too long")
        self._show(upstream)

    async def _ask(self, upstream: Upstream) -> str | None:
        """Probe an upstream; return what is wrong with it."""
        headers = headers_for(upstream.config.key, "probe")
        async with self._http.ask("GET", f"{upstream.url}/health", headers) as response:
            if response.status >= 500:
                return f"it says that it is not healthy (status {response.status})"
            with suppress(UpstreamError), trio.move_on_after(HEALTH_BODY_S):
                await response.read_up_to(MAX_HEALTH_BYTES)
        async with self._http.ask("GET", f"{upstream.url}/v1/models", headers) as response:
            if response.status in (UNAUTHORIZED, FORBIDDEN):
                return "it does not accept this server's key"
            if response.status == OK:
                upstream.read_models(await response.read_up_to(MAX_PROBE_BYTES))
        return None
