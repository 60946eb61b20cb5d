"""The bodies of requests in progress: how they arrive, and the memory budget that they share.

`MeteredBody` replaces Quart's body and takes memory from the `BodyBudget` as bytes arrive. A handler takes the whole
body with `take_body`; the share is released with the request's scope, or sooner, when the prompts are encoded.

What must always hold: a body of at most FREE_BYTES is never refused for lack of memory; with keys, no tenant holds more
than half of the budget; a share is released exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, cast

import trio
from hypercorn.typing import ASGIReceiveCallable
from quart import Request, request
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from ..http.connection import Connection
from ..http.scope import RequestScope, ScopedHTTP
from ..request.errors import APIError, unavailable
from ..request.request_context import current_request_context
from .upload_forms import StreamedBody, is_upload

FREE_BYTES = 64 * 1024
"""Bytes of each body that are not counted: the number of connections bounds them."""
SHARE_KEY = "body_share"
"""Where the ASGI scope of a request has its `BodyShare`."""


class BodyBudget:
    """The memory of request bodies, as received and as parsed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.by_tenant: Counter[str] = Counter()


class BodyShare:
    """One request's share of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self._num_counted = 0
        self._tenant: str | None = None
        self._is_open = True

    def grow(self, num_bytes: int) -> None:
        """Take `num_bytes` more. Raises APIError (503) if there is no room."""
        self._num_bytes += num_bytes
        wanted = max(0, self._num_bytes - FREE_BYTES) - self._num_counted
        if not self._is_open or wanted <= 0:
            return
        budget = self._budget
        if budget.num_bytes + wanted > budget.max_bytes or self._is_over_share(wanted):
            raise _no_room()
        self._count(wanted)

    def assign(self, tenant: str) -> None:
        """Count the share, with its earlier bytes, for `tenant`. Raises APIError (503) if it holds too much."""
        self._tenant = tenant
        held = self._num_counted if self._is_open else 0
        if held and self._is_over_share(held):
            self._tenant = None
            raise _no_room()
        if held:
            self._budget.by_tenant[tenant] += held

    def release(self) -> None:
        """Release everything. May be called any number of times."""
        self._count(-self._num_counted)
        self._is_open = False

    def _is_over_share(self, wanted: int) -> bool:
        budget, tenant = self._budget, self._tenant
        return tenant is not None and budget.by_tenant[tenant] + wanted > budget.max_bytes // 2

    def _count(self, num_bytes: int) -> None:
        self._num_counted += num_bytes
        self._budget.num_bytes += num_bytes
        if self._tenant is not None:
            self._budget.by_tenant[self._tenant] += num_bytes
            if not self._budget.by_tenant[self._tenant]:
                del self._budget.by_tenant[self._tenant]  # else it would grow with every tenant ever seen


class MeteredBody:
    """The body of one request: bytes are counted as they arrive, and handed over once.

    It inherits nothing from Quart's own body, since that changes between versions: Quart up to 0.22 calls `append`,
    later versions await `put` and call `disconnect`.
    """

    def __init__(self, length: int | None, max_length: int | None, share: BodyShare) -> None:
        self.share = share
        self._max_length = max_length
        self._data = bytearray()
        self._complete = trio.Event()
        self._refusal: Exception | None = None
        if max_length is not None and length is not None and length > max_length:
            self._refusal = RequestEntityTooLarge()

    def append(self, data: bytes) -> None:
        """Take bytes from the client; drop them after a refusal."""
        if not data or self._refusal is not None:
            return
        if self._max_length is not None and len(self._data) + len(data) > self._max_length:
            self._refuse(RequestEntityTooLarge())
            return
        try:
            self.share.grow(len(data))
        except APIError as error:
            self._refuse(error)
            return
        self._data += data

    async def put(self, data: bytes) -> None:
        """Take bytes without waiting: the budget and the length bound them."""
        self.append(data)

    def set_complete(self) -> None:
        self._complete.set()

    def disconnect(self) -> None:
        """Do nothing: whoever waits for the rest of the body is cancelled with the request."""

    async def take(self, connection: Connection | None = None) -> bytearray:
        """Wait for the whole body and hand it over. Raises RequestEntityTooLarge and APIError."""
        if self._refusal is None:
            if connection is not None and not self._complete.is_set():
                await connection.ask_for_body()
            await self._complete.wait()
        if self._refusal is not None:
            raise self._refusal
        data, self._data = self._data, bytearray()
        return data

    def _refuse(self, refusal: Exception) -> None:
        self._refusal = refusal
        self._data = bytearray()
        self.set_complete()


class MeteredRequest(TrioRequest):
    """A request whose body takes its memory from the application's budget."""

    def __init__(self, *args: Any, max_content_length: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, max_content_length=max_content_length, **kwargs)
        if is_upload(self.method, self.path):
            self.body = cast(Any, StreamedBody())
            return
        share = cast(BodyShare, cast(dict[str, Any], self.scope)[SHARE_KEY])
        self.body = cast(Any, MeteredBody(self.content_length, max_content_length, share))


class MeteredHTTP(ScopedHTTP):
    """The connection of one request, with a share of the application's budget for its body."""

    def open_scope(self, scope: RequestScope) -> None:
        super().open_scope(scope)
        app = cast(Any, self.app)  # a QuipuApp of `app.py`, which imports this module
        share = BodyShare(app.bodies)
        scope.on_close(share.release)
        cast(dict[str, Any], self.scope)[SHARE_KEY] = share

    async def handle_messages(  # type: ignore[override]  # Quart's own has no nursery
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        if not isinstance(request.body, StreamedBody):
            await super().handle_messages(nursery, request, receive)
            return
        while (message := await receive())["type"] == "http.request":
            await request.body.feed(message["body"])
            if not message["more_body"]:
                request.body.set_complete()
        nursery.cancel_scope.cancel()


async def take_body() -> tuple[bytearray, BodyShare]:
    """Return the whole body of the current request, and its share of the budget.

    Raises RequestEntityTooLarge, RequestTimeout and APIError: 503 if there is no memory, 415 for a compressed body.
    """
    _check_encoding()
    body = cast(MeteredBody, cast(object, request.body))
    _assign(body.share)
    with trio.move_on_after(request.body_timeout or float("inf")):
        return await body.take(current_request_context().connection), body.share
    raise RequestTimeout()


def stream_body() -> tuple[AsyncGenerator[bytes, None], BodyShare]:
    """Return the pieces of the current request's body as they arrive, and its share, for what is kept of them.

    For requests to `UPLOAD_PATHS`. Raises APIError like `take_body`; reading may raise RequestTimeout.
    """
    _check_encoding()
    share = cast(BodyShare, cast(dict[str, Any], request.scope)[SHARE_KEY])
    _assign(share)
    body = cast(StreamedBody, cast(object, request.body))
    return body.pieces(current_request_context().connection, request.body_timeout), share


def _check_encoding() -> None:
    if request.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        message = "Unsupported `Content-Encoding`: this server reads bodies without compression only."
        raise APIError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            message,
            "invalid_request_error",
            param="Content-Encoding",
            code="unsupported_content_encoding",
        )


def _assign(share: BodyShare) -> None:
    principal = current_request_context().principal
    if principal.key_id is not None:
        share.assign(principal.tenant)


def _no_room() -> APIError:
    return unavailable("The server is overloaded: too much memory is taken by request bodies. Try again later.")
