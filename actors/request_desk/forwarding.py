"""The interface of the upstreams, as the request desk and the web layer see them.

`actors/fleet/upstreams/actor.py` implements it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Protocol

import attrs

from ..messages.upstream import Forward, ForwardOutlet


class UpstreamState(StrEnum):
    """What probes know of an upstream."""

    STARTING = "starting"  # it has not answered yet
    READY = "ready"
    DOWN = "down"  # it gets no request until it answers a probe


@attrs.frozen
class UpstreamStatus:
    """One upstream, for operators."""

    engine_id: int
    """Given as to engines, so that no engine has it."""
    url: str
    state: UpstreamState
    detail: str
    """Why it is not ready."""
    models: tuple[str, ...]
    """As it names them."""
    num_running: int
    """Requests that it was sent and has not answered."""
    num_blocks_known: int | None
    """Blocks of its cache, as far as its events say. None: it publishes none, or its tokenizer is not known."""
    failures: int
    """How often it went down."""


class Placement(Protocol):
    """Where a request is to go that both this server's engines and an upstream can serve."""

    @property
    def is_passed_on(self) -> bool: ...

    def on_routed(self) -> None:
        """Note that it was sent there, or is over. May be called any number of times."""
        ...


class Forwarding(Protocol):
    """Passes requests on to other servers."""

    def place(self, model: str, body: bytes | bytearray, tenant: str) -> Placement:
        """Choose where a request for a model goes that engines of this server serve, too.

        `on_routed` has to be called, however the request ends.
        """
        ...

    def stands_in(self, models: Collection[str]) -> bool:
        """Whether an upstream is ready that serves one of these models."""
        ...

    async def pass_on(self, forward: Forward, outlet: ForwardOutlet) -> None:
        """Have an upstream answer an open request, whose account is told of it. Returns when nothing more comes.

        To be cancelled when the client leaves.
        """
        ...

    def serves(self, model: str) -> bool:
        """Whether requests for a model are passed on."""
        ...

    def statuses(self) -> Sequence[UpstreamStatus]:
        """Return the upstreams, in the order of their configuration."""
        ...
