"""The lifetime of one HTTP request, with callbacks that release what it holds.

Handlers register on their `RequestScope` what must be released when the request ends; nothing else in the web layer
releases anything. A body generator owns nothing: one that is cancelled before its first step never runs its `finally`.

What must always hold: each callback runs exactly once, after every task of the request has ended, in the reverse order
of registration, however the request ended; no failure hides another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import ParamSpec, TypeVarTuple, Unpack, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import request
from quart_trio.asgi import TrioASGIHTTPConnection

P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

SCOPE_KEY = "request_scope"


class RequestScope:
    """Ends with its request: when it is answered, fails, its client disconnects or the server stops."""

    def __init__(self, nursery: trio.Nursery, releases: Releases) -> None:
        self._nursery: trio.Nursery | None = nursery
        self._releases = releases

    def start_soon(self, task: Callable[[Unpack[Ts]], Awaitable[object]], *args: *Ts) -> None:
        """Start a task that must not outlive the request: it is cancelled when the response has been sent."""
        if self._nursery is None:
            raise RuntimeError("the request has ended")
        self._nursery.start_soon(task, *args)

    def cancel(self) -> None:
        """Cancel the request. Does nothing if it has ended."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def forget(self) -> None:
        """Break the cycle from the nursery through its task's context to this scope."""
        self._nursery = None

    def on_close(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `fn` when the request ends. It is synchronous, so it cannot be cancelled."""
        self._releases.push(lambda: fn(*args, **kwargs))


class Releases:
    """A stack of callbacks that raises all their failures; in an `ExitStack` the last one hides the others."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def push(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def __enter__(self) -> Releases:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failures: list[BaseException] = []
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except BaseException as failure:
                failures.append(failure)
        if failures:
            # The request's own exception (often trio.Cancelled) is among them; trio finds its scope inside a group.
            own = [] if exc is None else [exc]
            raise BaseExceptionGroup("a release failed at the end of a request", [*own, *failures])


class ScopedHTTP(TrioASGIHTTPConnection):
    """quart-trio's connection of one request, with a `RequestScope` around it."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        with Releases() as releases:
            async with trio.open_nursery() as nursery:
                scope = RequestScope(nursery, releases)
                releases.push(scope.forget)
                self.open_scope(scope)
                await super().__call__(receive, send)  # returns at the end of the response or of the client
                nursery.cancel_scope.cancel()

    def open_scope(self, scope: RequestScope) -> None:
        """Put the scope where `request_scope()` finds it, before anything of the request is read."""
        # Servers and applications extend the ASGI scope, a dict; its type lists only the standard keys.
        cast(dict[str, object], self.scope)[SCOPE_KEY] = scope


def request_scope() -> RequestScope:
    """Return the scope of the current request."""
    return cast(RequestScope, cast(dict[str, object], request.scope)[SCOPE_KEY])
