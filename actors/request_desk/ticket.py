"""One open request, for its handler. Used by `desk.py`, which makes it and does what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..messages.tokenizer import Encode
from ..messages.upstream import Forward, ForwardOutlet
from .forwarding import Forwarding
from .mailbox import Mailbox


class TicketDesk(Protocol):
    """The part of the request desk that a ticket needs."""

    upstreams: Forwarding | None

    async def start_encoding(self, request: Encode) -> None: ...

    def when_encoded(self, request_id: str, call: Callable[[], object]) -> None: ...

    def dropped_of(self, request_id: str) -> tuple[str, ...]: ...

    def expire(self, request_id: str, after_s: float) -> None: ...

    def leave(self, request_id: str) -> None: ...


class RequestTicket:
    """One open request, for its handler."""

    def __init__(self, desk: TicketDesk, request: Encode | Forward, mailbox: Mailbox) -> None:
        self._desk = desk
        self._request: Encode | Forward | None = request
        """Dropped once the tokenizer has it: the ticket lives as long as the response, its prompts need not."""
        self._request_id = request.request_id
        self._mailbox = mailbox

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def mailbox(self) -> Mailbox:
        return self._mailbox

    async def start(self) -> None:
        request = self._take()
        assert isinstance(request, Encode)
        await self._desk.start_encoding(request)

    async def pass_on(self, outlet: ForwardOutlet) -> None:
        request, upstreams = self._take(), self._desk.upstreams
        assert isinstance(request, Forward) and upstreams is not None
        await upstreams.pass_on(request, outlet)

    def _take(self) -> Encode | Forward:
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("this request was started before")
        return request

    def when_encoded(self, call: Callable[[], object], /) -> None:
        self._desk.when_encoded(self._request_id, call)

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._desk.dropped_of(self._request_id)

    def expire(self, after_s: float) -> None:
        self._desk.expire(self._request_id, after_s)

    def leave(self) -> None:
        self._request = None
        self._desk.leave(self._request_id)
