"""The router: sends each sequence to one of the engines, and keeps what it knows of them up to date.

Receives sequences and aborts from the request desk, reports from the engines' links, and from the supervisors which
engines there are. Puts what it sends into the engines' queues (`request_desk/engine_pool.py`), and tells the accountant
how much of a prompt it expects its engine to have cached (`Routed`); what the client is told is what the engine
reports.

It keeps no state of its own: everything is in the route store, which outlives it. A message that kills it twice is
handled in the simplest way: a prompt goes to the next engine in turn, a report is passed over.

What must always hold: of messages that arrive together, news of engines are handled before prompts; each message is
handled, whatever happens to the router.
"""

from __future__ import annotations

import time

import structlog
import trio

from ..channel import Receiver
from ..messages.accountant import StepReport
from .dispatch import Dispatch
from .route_store import RouterMessage, RouteStore

log = structlog.get_logger()

SLICE_S = 0.002
"""How long the router may work without letting other tasks run."""


class Router:
    def __init__(self, store: RouteStore, dispatch: Dispatch) -> None:
        self._store = store
        self._dispatch = dispatch

    async def run(self, inbox: Receiver[RouterMessage]) -> None:
        store, dispatch = self._store, self._dispatch
        while True:
            slice_end = time.perf_counter() + SLICE_S
            while store.reports or store.prompts:
                if store.reports:
                    news = store.reports[0]
                    if store.is_to_be_careful and isinstance(news, StepReport):
                        log.error("router.report_passed_over", engine_id=news.engine_id, number=news.number)
                    else:
                        dispatch.handle_news(news)
                    store.take_off(store.reports)
                else:
                    dispatch.handle_prompt(store.prompts[0])
                    store.take_off(store.prompts)
                if time.perf_counter() > slice_end:
                    await trio.lowlevel.checkpoint()
                    slice_end = time.perf_counter() + SLICE_S
            store.add(await inbox.receive_all())
