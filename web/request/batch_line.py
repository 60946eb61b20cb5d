"""A line of a batch while it is served: a request that nobody has sent over HTTP.

`web/batches/` calls the application with a `LineRequest` in its ASGI scope. The handlers serve it like any other
request, with the rights of the key that created the batch, and leave its answer to the line: it is kept before its
usage record is written, so that a crash in between neither loses an answer that was billed nor bills one that was lost.

What must always hold: no client can put anything into this part of the scope; a line's answer is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import attrs
from quart import request

from quipu.actors.messages.handler import Closed

STATE_KEY: Final = "batch_line"
Render = Callable[[Closed], "RenderedAnswer"]
"""Makes the answer of a request that has ended. Raises APIError for one that has failed."""


@attrs.frozen
class RenderedAnswer:
    status: int
    pieces: Iterator[bytes]
    """The body; each piece takes about a millisecond to make."""


@attrs.define(eq=False)
class LineRequest:
    batch_id: str
    tenant: str
    key_id: str | None
    """The key that created the batch. None: the server had no keys."""
    on_end: Callable[[LineRequest, Closed, Callable[[], object]], object]
    """Keeps the answer, then calls the function (`KeepAnswer`)."""
    render: Render | None = None
    """Set by the handler when the request is opened."""

    def keep(self, closed: Closed, write: Callable[[], object]) -> None:
        self.on_end(self, closed, write)


def current_line() -> LineRequest | None:
    """Return the line that is being served; None for a request of a client."""
    state = cast(dict[str, Any], request.scope).get("state") or {}
    line = state.get(STATE_KEY)
    return line if isinstance(line, LineRequest) else None
