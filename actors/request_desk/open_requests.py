"""What the request desk keeps about each open request and each question about a prompt. Used by `desk.py`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from ..messages.handler import Counted, Keyed
from ..messages.outcomes import RequestError
from ..messages.scheduler import Submit
from .mailbox import Mailbox


@attrs.define(eq=False)
class OpenRequest:
    """One request, from its opening until its scope has left."""

    request_id: str
    mailbox: Mailbox
    submitted_ids: list[int] = attrs.field(factory=list)
    group_id: int = 0
    """The last group of sequences that was begun: all of them, or those of one prompt (`Submit`)."""
    num_to_come: int = 0
    """Sequences of this group that its engine still expects."""
    tokens_to_come: int = 0
    """Their prompt tokens."""
    stopped: bool = False
    """It has left or failed: nothing more of it is submitted."""
    is_encoding: bool = False
    """The tokenizer holds it."""
    is_encoded: bool = False
    """Its prompts are no longer needed."""
    on_encoded: list[Callable[[], object]] = attrs.field(factory=list)
    dropped: tuple[str, ...] = ()
    """Paths of what the tokenizer has dropped from the schemas of its tools."""
    on_stopped: Callable[[], object] | None = None

    def note_submitted(self, submit: Submit) -> None:
        """Record one of its sequences."""
        self.submitted_ids.append(submit.sequence_id)
        self.group_id = submit.group_id
        self.num_to_come, self.tokens_to_come = submit.num_to_come, submit.tokens_to_come

    def when_stopped(self, call: Callable[[], object]) -> None:
        """Call `call` when the request leaves or fails; at once if it already has."""
        if self.stopped:
            call()
        else:
            self.on_stopped = call

    def mark_stopped(self) -> None:
        self.stopped = True
        if self.on_stopped is not None:
            call, self.on_stopped = self.on_stopped, None
            call()

    def mark_encoded(self) -> None:
        self.is_encoded = True
        calls, self.on_encoded = self.on_encoded, []
        for call in calls:
            call()


class PromptSlot:
    """Where the tokenizer puts the answer to one question about a prompt."""

    def __init__(self) -> None:
        self._answer: Counted | Keyed | RequestError | None = None
        self._answered = trio.Event()
        self._has_left = False
        self._on_left: Callable[[], object] | None = None

    def put(self, answer: Counted | Keyed | RequestError, /) -> None:
        self._answer = answer
        self._answered.set()

    async def wait(self) -> Counted | Keyed | RequestError:
        await self._answered.wait()
        assert self._answer is not None
        return self._answer

    def when_left(self, call: Callable[[], object], /) -> None:
        self._on_left = call
        if self._has_left:
            call()

    def leave(self) -> None:
        """Give up waiting for the answer."""
        self._has_left = True
        if self._on_left is not None:
            self._on_left()
