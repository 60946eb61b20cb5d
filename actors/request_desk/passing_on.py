"""The interface of the upstreams, as the request desk and the web layer see them.

`actors/upstreams/actor.py` implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class PassingOn(Protocol):
    """Passes requests on to other servers."""

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
