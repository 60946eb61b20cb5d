"""Requests that another server answers: what is passed on to it, and what it says of them."""

from __future__ import annotations

from typing import Protocol

import attrs

from .counts import UNKNOWN, Count
from .prompts import Prompt


@attrs.frozen
class Forward:
    """A request to be passed on as it came."""

    request_id: str
    path: str
    """Of the endpoint, here and there."""
    model: str
    body: bytes = attrs.field(repr=False)
    is_stream: bool
    shows_usage: bool = True
    """The client is to see usage in a stream; it is requested from the upstream in any case."""
    asks_details: bool = False
    """The client asked for details of cached tokens, so that it is told a router's estimate where there is no count."""
    has_stream_options: bool = False
    """The body has a field of this name..."""
    asks_usage: bool = False
    """...that asks for usage already..."""
    asks_continuous: bool = False
    """...and for usage in every chunk."""
    has_one_choice: bool = True
    """One prompt and one choice, so that usage in a chunk is all that was used so far."""
    is_timed: bool = False
    """It has a deadline (`--request-timeout`)."""
    tenant: str = ""
    affinity: bytes = b""
    prompts: tuple[Prompt, ...] = attrs.field(default=(), repr=False)
    """For routers that know what an upstream has cached. Empty: they are not known."""


@attrs.frozen
class UpstreamRefusal:
    """An upstream's answer to a request that it does not serve: the client gets it as it is."""

    status: int
    body: bytes
    content_type: str
    retry_after: str | None = None


class ForwardOutlet(Protocol):
    """Where an upstream's response goes. Its end is only sent once the usage record is stored."""

    def on_routed(self) -> None:
        """Note that an upstream was chosen. Called once for each that is tried."""

    def begin(self) -> None:
        """Note that a stream follows."""

    async def send(self, data: bytes) -> None:
        """Send a part of a stream. Waits while the client is slow."""

    def finish(self, last: bytes) -> None:
        """Keep what ends a stream, or a whole response, until the record is stored."""

    def end_with(self, error: bytes) -> None:
        """Keep the upstream's own error, which ends a stream."""

    def refuse(self, refusal: UpstreamRefusal) -> None:
        """Keep what the client gets in place of a response."""


@attrs.frozen
class UpstreamUsage:
    """What an upstream says that a request used. What it does not say, or cannot be, is unknown."""

    prompt: Count = UNKNOWN
    cached: Count = UNKNOWN
    cache_write: Count = UNKNOWN
    completion: Count = UNKNOWN
    reasoning_tokens: int = 0
    said: str | None = None
    """All of it as JSON. None: nothing was said, or too much to be kept."""
    problems: tuple[str, ...] = ()
    """Numbers that cannot be."""
