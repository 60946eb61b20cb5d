"""The actors, run under trio in a thread of their own, for callers that run under something else, or nothing.

`submit` starts a task in that thread, and returns a `Call`, whose future ends with it. A caller that no longer wants a
call cancels it, and everything that it holds is released there.

What must always hold: a call's future always ends, also if the thread does; the thread never waits for a caller; when
`stop` has returned, no process and no task of the engine is left, and each request has its record.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Generic, TypeVar

import attrs
import structlog
import trio

from quipu.actors.last_records import wait_accounts_closed
from quipu.actors.ledger.reconciling import parse_metrics
from quipu.actors.ledger.service import open_ledger
from quipu.actors.shared.error_groups import first_leaf
from quipu.actors.wiring import Runtime, split

from .library_errors import EngineError
from .model_settings import Resolved

T = TypeVar("T")
POLL_S: Final = 0.02
"""How often a starting engine is asked whether it is ready."""


@attrs.define(eq=False)
class Call(Generic[T]):
    """A task in the thread. Its future has its result, its exception, or CancelledError."""

    future: Future[T] = attrs.field(factory=Future)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class EngineThread:
    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self.ready: Future[None] = Future()
        """Ends when requests can be made; with EngineError if they never can."""
        self._thread = threading.Thread(target=self._run, name="quipu", daemon=True)
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopping = trio.Event()
        self._runtime: Runtime | None = None
        self._nursery: trio.Nursery | None = None
        self._why_stopped = "the engine was stopped"
        self._open: set[Call[Any]] = set()
        """Calls whose futures have not ended."""

    def start(self) -> None:
        """Start the thread; `ready` says when it serves."""
        self._thread.start()

    def stop(self) -> None:
        """End all calls, the engine and the thread. May be called any number of times, from any thread but its own."""
        self._soon(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, work: Callable[[Runtime], Awaitable[T]]) -> Call[T]:
        """Run `work` in the thread. If the engine has stopped, the call ends with EngineError."""
        call: Call[T] = Call()
        self._open.add(call)
        if not self._soon(self._begin, call, work):
            self._fail(call)
        return call

    def cancel(self, call: Call[Any]) -> None:
        """Cancel a call's task, if it has not ended. Returns at once."""
        self._soon(call.scope.cancel)

    def _soon(self, function: Callable[..., object], *args: Any) -> bool:
        """Have a function called in the thread. False: the thread has ended."""
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(partial(function, *args))
        except trio.RunFinishedError:
            return False
        return True

    def _begin(self, call: Call[T], work: Callable[[Runtime], Awaitable[T]]) -> None:
        if self._nursery is not None:  # otherwise it fails with all others, at the end of the thread
            self._nursery.start_soon(self._serve, call, work)

    async def _serve(self, call: Call[T], work: Callable[[Runtime], Awaitable[T]]) -> None:
        """Run a call's work. If the engine stops meanwhile, the call ends with the thread, when the reason is known."""
        assert self._runtime is not None
        try:
            with call.scope:
                call.future.set_result(await work(self._runtime))
            if not call.future.done():
                call.future.set_exception(CancelledError())
        except Exception as error:
            call.future.set_exception(error)
        if call.future.done():
            self._open.discard(call)

    def _fail(self, call: Call[Any]) -> None:
        self._open.discard(call)
        if not call.future.done():
            call.future.set_exception(EngineError(self._why_stopped))

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # of the engine, for whoever waits; nobody else is here to see it
            self._why_stopped = str(first_leaf(error)) or type(first_leaf(error)).__name__
        if not self.ready.done():
            self.ready.set_exception(EngineError(self._why_stopped))
        while self._open:
            self._fail(self._open.pop())

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with AsyncExitStack() as stack:
            journal = ledger = None
            if self._resolved.ledger is not None:
                ledger = await stack.enter_async_context(open_ledger(self._resolved.ledger))
                journal = ledger.journal
            runtime = await stack.enter_async_context(split(self._resolved.config, self._resolved.info, journal))
            if ledger is not None:
                ledger.counters = lambda: parse_metrics(runtime.metrics.render().decode())
            self._runtime = runtime
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._watch)
                try:
                    await self._stopping.wait()
                finally:
                    self._nursery = None  # before it closes: who began a task in it then would end the whole run
                nursery.cancel_scope.cancel()
            await wait_accounts_closed(runtime.entry_store)

    async def _watch(self) -> None:
        """Say when the engine is ready."""
        assert self._runtime is not None
        while not self._runtime.desk.health().is_ready:  # noqa: ASYNC110 - once; the desk is asked, it does not call
            await trio.sleep(POLL_S)
        self.ready.set_result(None)


def be_quiet() -> None:
    """Log warnings alone, to standard error, unless the program has configured structlog."""
    if not structlog.is_configured():
        import logging
        import sys

        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
