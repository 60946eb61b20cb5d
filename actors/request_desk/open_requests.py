"""An open request, for its handler and for the request desk; and a question about a prompt that is to be answered.

Made by `desk.py` and `prompt_questions.py`. An open request is its handler's `Ticket`; the desk and the queue of
submitted sequences note in it how far it got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ..messages.handler import PromptAnswer
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.scheduler import Submit
from ..messages.tokenizer import Encode
from ..messages.upstream import Forward, ForwardOutlet
from .early_text import EarlyText
from .interface import Forwarding
from .mailbox import Mailbox


class RequestHolder(Protocol):
    """The part of the request desk that an open request needs."""

    upstreams: Forwarding | None

    async def encode(self, opened: OpenRequest, /) -> None: ...

    def fail(self, request_id: str, error: RequestError) -> None: ...

    def leave(self, request_id: str) -> None: ...


@attrs.define(eq=False)
class OpenRequest:
    """One request, from its opening until its scope has left. Implements `interface.Ticket`."""

    request_id: str
    _desk: RequestHolder
    message: Encode | Forward | None = attrs.field(repr=False)
    """Dropped by who serves it: this object lives as long as the response, its prompts need not."""
    adapter: str = ""
    """Digest of its adapter."""
    is_batch: bool = False
    """It is a line of a batch, which is run again if the server does not complete it."""
    mailbox: Mailbox = attrs.Factory(lambda opened: _mailbox_for(opened.message), takes_self=True)
    submitted_ids: list[int] = attrs.field(factory=list)
    num_live: int = 0
    """Those of them that have not ended."""
    group_id: int = 0
    """The last group of sequences that was begun: all of them, or those of one prompt (`Submit`)."""
    num_to_come: int = 0
    """Sequences of this group that its engine still expects."""
    tokens_to_come: int = 0
    """Their prompt tokens."""
    stopped: bool = False
    """It has left or failed: nothing more of it is submitted."""
    is_started: bool = False
    is_encoding: bool = False
    """The tokenizer holds it, also after it has left: a thread may be reading its texts."""
    is_encoded: bool = False
    """Its prompts are no longer needed."""
    dropped: tuple[str, ...] = ()
    """Paths of what the tokenizer has dropped from the schemas of its tools."""
    _on_encoded: list[Callable[[], object]] = attrs.field(factory=list)
    on_stopped: Callable[[], object] | None = None
    _has_room: trio.Event | None = None
    """While the tokenizer waits for room: set when one of its sequences ends."""

    # ------------------------------------------------------------ for its handler

    async def start(self) -> None:
        self._mark_started()
        await self._desk.encode(self)

    async def pass_on(self, outlet: ForwardOutlet) -> None:
        self._mark_started()
        (message, self.message), upstreams = (self.message, None), self._desk.upstreams
        assert isinstance(message, Forward) and upstreams is not None
        with trio.CancelScope() as scope:
            self.when_stopped(scope.cancel)
            await upstreams.pass_on(message, outlet)

    def _mark_started(self) -> None:
        if self.is_started:
            raise RuntimeError("this request was started before")
        self.is_started = True

    def when_encoded(self, call: Callable[[], object], /) -> None:
        if self.is_encoded:
            call()
        else:
            self._on_encoded.append(call)

    def expire(self, after_s: float) -> None:
        message = f"The request took longer than {after_s:g} seconds."
        self._desk.fail(self.request_id, RequestError(ErrorKind.TIMEOUT, message))

    def leave(self) -> None:
        self._desk.leave(self.request_id)

    # ------------------------------------------------------------ for the desk, the tokenizer and the queue

    def note_submitted(self, submit: Submit) -> None:
        self.submitted_ids.append(submit.sequence_id)
        self.num_live += 1
        self.group_id = submit.group_id
        self.num_to_come, self.tokens_to_come = submit.num_to_come, submit.tokens_to_come

    def note_ended(self) -> None:
        """Note that one of its submitted sequences has ended."""
        self.num_live -= 1
        if self._has_room is not None:
            self._has_room.set()

    async def until_room(self, submit: Submit, window: int) -> None:
        """Wait until fewer than `window` of its sequences are live; the first ones, and later choices of a prompt, do
        not wait: an engine may wait for them, since they are announced. No checkpoint if there is room."""
        is_announced = not submit.takes_place or submit.sequence_id != submit.group_id
        while self.num_live >= window and not is_announced:
            self.release_prompts()
            self._has_room = trio.Event()
            await self._has_room.wait()

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
        """Note that the tokenizer holds none of its prompts, or never will. Later calls have no effect."""
        self.is_encoding, self.on_stopped = False, None
        self.release_prompts()

    def release_prompts(self) -> None:
        """Note that its prompts are encoded, and nothing needs their texts. Later calls have no effect."""
        self.is_encoded, self.message = True, None
        calls, self._on_encoded = self._on_encoded, []
        for call in calls:
            call()


def _mailbox_for(message: Encode | Forward | None) -> Mailbox:
    if not isinstance(message, Encode) or message.num_choices == 1:
        return Mailbox()
    return Mailbox(EarlyText(len(message.prompts), message.num_choices))


class PromptSlot:
    """Where the tokenizer puts the answer to one question about a prompt."""

    def __init__(self) -> None:
        self._answer: PromptAnswer | None = None
        self._answered = trio.Event()
        self._has_left = False
        self._on_left: Callable[[], object] | None = None

    def put(self, answer: PromptAnswer, /) -> None:
        self._answer = answer
        self._answered.set()

    async def wait(self) -> PromptAnswer:
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
