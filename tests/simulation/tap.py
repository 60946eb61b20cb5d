"""Sees every message between actors: digests it, counts the points that are passed, and crashes actors at some.

    Channel.post ──▶ digest, `sends`, `sent`           Channel.receive_all ──▶ `takes`, `handled`
    Channel.deliver_now ──▶ `sends`                     what actors use (CALLED) ──▶ `calls`, `called`

While a `Tap` is installed, the methods of `Channel` and those of `CALLED` go through it. Which actor acts is read off
the running task; what `deliver_now` calls acts for the receiver. What passes are planned, and what they did, is noted
for the oracle (`passes.py`).

What must always hold: without a crash, messages and their order are those of a run without a tap.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs
import msgspec
import trio

from quipu.actors.channel import Channel
from tests.simulation.drawn_faults import Fault
from tests.simulation.passes import Passes
from tests.simulation.points import CALLED, Call, Point

MOST_MESSAGES = 300_000
"""A run with more goes round in circles."""
ACTORS = {
    "run_scheduler": "scheduler",
    "run_block_manager": "block_manager",
    "end_moves": "end_moves",
    "run_executor": "executor",
    "run_mover": "mover",
    "store_in_order": "mover",
    "load": "mover",
    "fetch": "mover",
    "tell_if_late": "mover",
    "_serve_until_left": "tokenizer",
}
"""By the function of a task."""


class PlannedCrash(Exception):
    """What an actor crashes with."""


class EndlessRun(Exception):
    """There were more messages than any run needs."""


def _stand_in(value: Any) -> Any:
    """Return what is digested of a value that is no message: its type."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return type(value).__name__


@attrs.define(eq=False)
class Tap:
    crashes: Sequence[Fault]
    now: Callable[[], float]
    passes: Passes = attrs.field(factory=Passes)
    crashed: list[Fault] = attrs.field(factory=list)
    crash_times: list[float] = attrs.field(factory=list)
    death_times: list[float] = attrs.field(factory=list)
    """When the death of an engine was told."""
    num_messages: int = 0
    num_bytes: int = 0
    _digest: Any = attrs.field(factory=hashlib.sha256)
    _encoder: Any = attrs.field(factory=lambda: msgspec.msgpack.Encoder(enc_hook=_stand_in, order="deterministic"))
    _names: dict[trio.lowlevel.Task, str] = attrs.field(factory=dict)
    _acting: list[str] = attrs.field(factory=list)
    """Actors for which the running task acts, innermost last."""
    _in_hand: dict[str, list[str]] = attrs.field(factory=dict)
    """By task, the types of what it has taken last."""
    _num_passed: dict[tuple[str, str, str], int] = attrs.field(factory=dict)
    """By the actor, message and moment of a point."""
    _due: dict[tuple[str, str, str], Fault] = attrs.field(factory=dict)
    _num_channels: int = 0

    def __attrs_post_init__(self) -> None:
        for fault in self.crashes:
            assert fault.point is not None
            self._due.setdefault(attrs.astuple(fault.point), fault)

    @property
    def passed(self) -> Counter[Point]:
        """How often each point was passed."""
        return Counter({Point(*point): num for point, num in self._num_passed.items()})

    def disarm(self) -> None:
        """Crash no actor any more."""
        self._due.clear()

    @property
    def sha256(self) -> str:
        return str(self._digest.hexdigest())

    def note(self, what: str, content: object = None) -> None:
        """Add something that is no message to the digest."""
        self._digest.update(f"{self.now():.9f} {what} ".encode() + self._encode(content))

    def _encode(self, content: object) -> bytes:
        try:
            return bytes(self._encoder.encode(content))
        except (TypeError, ValueError, RecursionError, OverflowError):
            return type(content).__name__.encode()

    # ------------------------------------------------------------ who acts

    def _actor(self) -> str:
        if self._acting:
            return self._acting[-1]
        task = trio.lowlevel.current_task()
        if (name := self._names.get(task)) is None:
            function = task.name.rpartition(".")[2]
            name = ACTORS.get(function, "")
            if function == "keep_running":
                name = task.coro.cr_frame.f_locals["deaths"].actor
            self._names[task] = name
        return name

    def _pass(self, actor: str, message: str, moment: str) -> None:
        """Pass a point; crash if that is planned."""
        point = actor, message, moment
        num = self._num_passed[point] = self._num_passed.get(point, 0) + 1
        fault = self._due.get(point)
        if fault is not None and num == fault.nth:
            del self._due[point]
            self.crashed.append(fault)
            self.crash_times.append(self.now())
            self.note("crash", str(fault.point))
            raise PlannedCrash(str(fault.point))

    # ------------------------------------------------------------ what channels call

    def post(self, channel: Any, item: Any, post: Callable[[Any, Any], None]) -> None:
        number = channel.__dict__.get("tap_number")
        if number is None:
            self._num_channels += 1
            number = channel.tap_number = self._num_channels
        actor, kind = self._actor(), type(item).__name__
        body = self._encode(item)
        self.num_messages += 1
        self.num_bytes += len(body)
        if self.num_messages > MOST_MESSAGES:
            raise EndlessRun(f"{MOST_MESSAGES} messages in {self.now():g} s")
        self._digest.update(f"{self.now():.9f} {number} {actor} {kind} ".encode() + body)
        self.passes.note(self.now(), number, kind, item)
        if kind == "StepReport":
            self.passes.note_report(self.now(), item)
        if kind == "EngineDied":
            self.death_times.append(self.now())
        if not actor:
            post(channel, item)
            return
        self._pass(actor, kind, "sends")
        post(channel, item)
        self._pass(actor, kind, "sent")

    def deliver_now(self, channel: Any, item: Any, deliver: Callable[[Any, Any], bool]) -> bool:
        if (kind := type(item).__name__) == "StepReport":
            self.passes.note_report(self.now(), item)
        if actor := self._actor():
            self._pass(actor, kind, "sends")
        return deliver(channel, item)

    async def receive_all(
        self, channel: Any, take_now: Callable[[Any], bool] | None, receive: Callable[..., Any]
    ) -> list[Any]:
        actor = self._actor()
        if not actor:
            return list(await receive(channel, take_now))
        kinds = self._in_hand.pop(actor, ())
        for kind in kinds:
            self._pass(actor, kind, "handled")
        items: list[Any] = await receive(channel, None if take_now is None else self._taking_now(actor, take_now))
        try:
            for item in items:
                self._pass(actor, type(item).__name__, "takes")
        except PlannedCrash:
            channel.post_first(items)  # it crashes before it takes them
            raise
        self._in_hand[actor] = [type(item).__name__ for item in items]
        return items

    def _taking_now(self, actor: str, take_now: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def take(item: Any) -> bool:
            kind = type(item).__name__
            self._digest.update(f"{self.now():.9f} {actor} now {kind} ".encode() + self._encode(item))
            self._acting.append(actor)
            try:
                is_done = take_now(item)
                if is_done:
                    self._pass(actor, kind, "handled")
                return is_done
            finally:
                self._acting.pop()

        return take

    def _tapped(self, call: Call) -> Callable[..., Any]:
        """Return a method that an actor calls, with the points before and after it."""
        method = getattr(call.owner, call.name)

        def tapped(*arguments: Any) -> Any:
            if self._actor() != call.actor:
                return method(*arguments)
            self._pass(call.actor, call.name, "calls")
            result = method(*arguments)
            self._pass(call.actor, call.name, "called")
            return result

        return tapped

    @contextmanager
    def installed(self) -> Iterator[None]:
        post, receive_all, deliver_now = Channel.post, Channel.receive_all, Channel.deliver_now

        def tapped_post(channel: Any, item: Any, /) -> None:
            self.post(channel, item, post)

        async def tapped_receive(channel: Any, take_now: Callable[[Any], bool] | None = None) -> list[Any]:
            return await self.receive_all(channel, take_now, receive_all)

        def tapped_deliver(channel: Any, item: Any, /) -> bool:
            return self.deliver_now(channel, item, deliver_now)

        replaced = {"post": tapped_post, "receive_all": tapped_receive, "deliver_now": tapped_deliver}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(Channel, **replaced))
            for call in CALLED:
                stack.enter_context(mock.patch.object(call.owner, call.name, self._tapped(call)))
            yield
