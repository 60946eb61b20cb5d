"""What the front desk keeps of each open request, each sequence, and each count that waits. Used by `desk.py`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from ..messages.handler import Counted
from ..messages.outcomes import RequestError
from .mailbox import Mailbox


@attrs.define(eq=False)
class OpenRequest:
    """One request between its opening and its leaving."""

    request_id: str
    mailbox: Mailbox
    submitted_ids: list[int] = attrs.field(factory=list)
    num_to_come: int = 0
    """Sequences that the engine expects besides."""
    stopped: bool = False
    """It has left or failed: nothing more of it is submitted."""
    is_encoding: bool = False
    """The tokenizer has it."""
    is_encoded: bool = False
    """Its prompts are not needed any more."""
    on_encoded: list[Callable[[], object]] = attrs.field(factory=list)
    on_stopped: Callable[[], object] | None = None


@attrs.define(eq=False)
class LiveSequence:
    """A submitted sequence that has not been answered by a Terminal."""

    incarnation: int | None = None
    """The engine that was given it; None while it waits in the lane."""
    aborted: bool = False


class CountSlot:
    """Where the tokenizer leaves the answer to one `CountTokens`."""

    def __init__(self) -> None:
        self._answer: Counted | RequestError | None = None
        self._answered = trio.Event()
        self._has_left = False
        self._on_left: Callable[[], object] | None = None

    def put(self, answer: Counted | RequestError, /) -> None:
        self._answer = answer
        self._answered.set()

    async def wait(self) -> Counted | RequestError | None:
        await self._answered.wait()
        return self._answer

    def when_left(self, call: Callable[[], object], /) -> None:
        self._on_left = call
        if self._has_left:
            call()

    def leave(self) -> None:
        """Nobody waits any more."""
        self._has_left = True
        if self._on_left is not None:
            self._on_left()
