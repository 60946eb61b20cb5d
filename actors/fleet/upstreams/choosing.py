"""Who chooses where a request goes, as the upstreams' actor sees them (`router/`, `upstream_prompts.py`).

What must always hold: whatever was chosen is dropped once the request is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ...messages.upstream import Forward
from ...request_desk.interface import Placement


class Chosen(Protocol):
    """Where a request was sent (the router's)."""

    @property
    def engine_id(self) -> int: ...

    @property
    def estimate(self) -> int | None: ...


class Chooser(Protocol):
    """Chooses an upstream for each request (`router/upstream_routing.py`)."""

    def route(
        self, candidates: Sequence[int], num_bytes: int, prompts: Prompts, affinity: bytes | None = None
    ) -> Any: ...

    def on_answering(self, route: Any) -> None: ...

    def drop(self, route: Any) -> None: ...


class Balancer(Protocol):
    """Chooses between engines of this server and upstreams (`router/balance.py`)."""

    def place(self, candidates: Sequence[int], body: bytes | bytearray, tenant: str) -> Placement: ...


Prompts = Mapping[int, Any]
"""By upstream, a request's prompt as it cuts it into blocks."""
FindPrompts = Callable[[Forward], Awaitable[Prompts]]
"""Returns a request's prompt as each upstream cuts it into blocks, of which that is known."""
