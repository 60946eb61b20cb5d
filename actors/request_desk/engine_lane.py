"""The lane to the engine: the queue of messages to it, and which of the submitted sequences it holds.

Owned by the request desk. The desk submits through it; the detokenizer and the desk abort sequences; the accountant
marks the ends that the engine reports; the supervisor takes what is queued for its engine.

The queue is first in, first out. A `Submit` waits for a slot; an `Abort` never waits, since its `Submit` has made room
for it. So no `Submit` can follow its own `Abort`.

What must always hold: every submitted sequence is in `_live` until its Terminal or its engine's death is booked.
"""

from __future__ import annotations

import attrs

from ..channel import Channel
from ..messages.scheduler import Abort, ResetPrefixCache, Submit

EngineMessage = Submit | Abort | ResetPrefixCache


@attrs.define(eq=False)
class LiveSequence:
    """A submitted sequence that has not been answered by a Terminal."""

    incarnation: int | None = None
    """The engine that holds it; None while it is queued."""
    aborted: bool = False


class EngineLane:
    def __init__(self, channel: Channel[EngineMessage]) -> None:
        self._channel = channel
        self._live: dict[int, LiveSequence] = {}
        self._next_sequence_id = 1

    def __len__(self) -> int:
        return len(self._channel)

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    def new_sequence_ids(self, count: int) -> tuple[int, ...]:
        first = self._next_sequence_id
        self._next_sequence_id += count
        return tuple(range(first, first + count))

    # ------------------------------------------------------------ for the desk

    async def reserve(self) -> None:
        """Wait for a slot for a Submit. `put_reserved` or `cancel_reservation` must follow."""
        await self._channel.reserve()

    def cancel_reservation(self) -> None:
        self._channel.cancel_reservation()

    def put_reserved(self, submit: Submit) -> None:
        """Queue a Submit in the reserved slot."""
        self._live[submit.sequence_id] = LiveSequence()
        self._channel.put_reserved(submit)

    def post(self, message: Abort | ResetPrefixCache) -> None:
        """Queue a message without waiting."""
        self._channel.post(message)

    # ------------------------------------------------------------ for accountant and detokenizer

    def abort(self, sequence_id: int) -> None:
        """Have the engine end a sequence. Does nothing if it was told before, or the sequence has ended."""
        live = self._live.get(sequence_id)
        if live is not None and not live.aborted:
            live.aborted = True
            self._channel.post(Abort(sequence_id))

    def incarnation_of(self, sequence_id: int) -> int | None:
        """Return the engine that holds a sequence; None if none does."""
        live = self._live.get(sequence_id)
        return None if live is None else live.incarnation

    def mark_ended(self, sequence_id: int) -> None:
        """Note that the engine has ended a sequence, or that no engine will."""
        self._live.pop(sequence_id, None)

    # ------------------------------------------------------------ for the supervisor

    async def take_for(self, incarnation: int) -> list[EngineMessage]:
        """Wait for messages and take all that are queued for an engine, which from then on holds their sequences."""
        messages = await self._channel.receive_all()
        for message in messages:
            if isinstance(message, Submit) and (live := self._live.get(message.sequence_id)) is not None:
                live.incarnation = incarnation
        return messages

    def held_by(self, incarnation: int) -> tuple[int, ...]:
        """Return the sequences that an engine was given and has not ended."""
        return tuple(i for i, live in self._live.items() if live.incarnation == incarnation)
