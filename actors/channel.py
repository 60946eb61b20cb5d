"""Typed channel ends, in memory or over a Unix socket, behind one interface.

    Channel     in memory, first in, first out, bounded. There are two ways to add items: `send` waits for one of
                `capacity` slots; `post` always has room, and is for senders that must never wait (a scope that is
                being left, one answer per sequence). Callers of `post` bound how much they may still post.
    FrameReader, FrameWriter
                the same messages over a stream socket, between the web process and the engine process. A frame is

                    length  4 bytes, of what follows
                    incarnation  4 bytes: which engine this concerns
                    type    2 bytes: a number of WIRE_TYPES, or SUBMIT_AGAIN
                    body    msgpack

                The prompt of a request with several choices is sent once: a Submit that shares its lists with the
                previous one of its request is sent without them, and gets the same lists at the other end.

What must always hold: items are received once, in order; a frame of another incarnation is dropped; end of file means
that the peer is gone, and is reported as such.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import msgspec
import trio

from .messages.accountant import StepReport
from .messages.scheduler import Abort, ResetPrefixCache, Submit
from .messages.supervisor import EngineReady, EngineRefused, Heartbeat

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sender(Protocol[T_contra]):
    async def send(self, item: T_contra, /) -> None:
        """Wait for a slot and add an item."""
        ...


class Poster(Protocol[T_contra]):
    def post(self, item: T_contra, /) -> None:
        """Add an item; there is always room."""
        ...


class Receiver(Protocol[T]):
    async def receive_all(self) -> list[T]:
        """Wait until there are items and take all of them, in order."""
        ...


class Channel(Generic[T]):
    """An in-memory channel with one receiver and any number of senders."""

    def __init__(self, capacity: int) -> None:
        """`capacity` limits the items that wait after `send`; items added by `post` do not count."""
        if capacity < 1:
            raise ValueError(f"the capacity of a channel must be at least 1, got capacity={capacity}")
        self._items: list[T] = []
        self._num_free_slots = capacity
        self._num_queued_slots = 0
        self._senders = trio.lowlevel.ParkingLot()
        self._receiver: trio.lowlevel.Task | None = None

    def __len__(self) -> int:
        return len(self._items)

    async def reserve(self) -> None:
        """Wait for a slot and keep it. `put_reserved` or `cancel_reservation` must follow. This is a checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._num_free_slots > 0:
            self._num_free_slots -= 1
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._senders.park()  # a freed slot is handed over

    def put_reserved(self, item: T) -> None:
        """Add an item in a slot obtained from `reserve`."""
        self._num_queued_slots += 1
        self.post(item)

    def cancel_reservation(self) -> None:
        """Give back a slot obtained from `reserve`."""
        self._free_slots(1)

    async def send(self, item: T, /) -> None:
        await self.reserve()
        self.put_reserved(item)

    def post(self, item: T, /) -> None:
        self._items.append(item)
        self._wake_receiver()

    def post_first(self, items: Sequence[T]) -> None:
        """Add items before all others, in order; there is always room."""
        if items:
            self._items[:0] = items
            self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None:
            task, self._receiver = self._receiver, None
            trio.lowlevel.reschedule(task)

    async def receive_all(self) -> list[T]:
        if self._items:
            await trio.lowlevel.checkpoint()
        else:
            await self._wait_item()
        items, self._items = self._items, []
        queued, self._num_queued_slots = self._num_queued_slots, 0
        self._free_slots(queued)
        return items

    def take_nowait(self) -> list[T]:
        """Take all items there are, which may be none."""
        items, self._items = self._items, []
        queued, self._num_queued_slots = self._num_queued_slots, 0
        self._free_slots(queued)
        return items

    def _free_slots(self, count: int) -> None:
        woken = len(self._senders.unpark(count=count)) if count else 0
        self._num_free_slots += count - woken

    async def _wait_item(self) -> None:
        if self._receiver is not None:
            raise trio.BusyResourceError("another task is already receiving from this channel")
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


# ---------------------------------------------------------------- over a socket

WireMessage = Submit | Abort | ResetPrefixCache | EngineReady | EngineRefused | StepReport | Heartbeat

WIRE_TYPES: dict[int, type[WireMessage]] = {
    1: Submit,
    2: Abort,
    3: EngineReady,
    4: StepReport,
    5: ResetPrefixCache,
    6: EngineRefused,
    8: Heartbeat,
}
_NUMBERS = {cls: number for number, cls in WIRE_TYPES.items()}
SUBMIT_AGAIN = 7
"""Type of a Submit whose prompt and keys are those of the previous Submit of its request."""
_HEADER = struct.Struct("<IIH")
_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""Longest valid frame; a peer that sends a longer one is broken."""
MAX_WRITE_BYTES = 1 << 18
"""Bytes that are encoded before the loop gets to run: a request may have hundreds of long prompts."""


class Prompts:
    """The last Submit of each request that has more to come, as both ends of a stream have seen it."""

    def __init__(self) -> None:
        self._by_group: dict[int, Submit] = {}

    def __len__(self) -> int:
        return len(self._by_group)

    def last_of(self, message: Submit) -> Submit | None:
        return self._by_group.get(message.group_id)

    def note(self, message: Submit | Abort) -> Submit | None:
        """Record `message` as the one to share a prompt with. Returns the previous Submit of the same request."""
        if isinstance(message, Abort):
            return self._by_group.pop(message.sequence_id, None) if message.ends_group else None
        before = self._by_group.pop(message.group_id, None)
        if message.num_to_come:
            self._by_group[message.group_id] = message
        return before


def _shares_prompt(one: Submit, other: Submit) -> bool:
    return one.prompt_token_ids is other.prompt_token_ids and one.block_keys is other.block_keys


class PeerGone(Exception):
    """The other process closed its end or died. No further messages will be received."""


class FrameWriter:
    """Sends messages of one incarnation down a stream. One task at a time."""

    def __init__(self, stream: trio.abc.SendStream, incarnation: int) -> None:
        self._stream = stream
        self._incarnation = incarnation
        self._encoder = msgspec.msgpack.Encoder()
        self._prompts = Prompts()

    def encode(self, message: WireMessage) -> bytes:
        number = _NUMBERS[type(message)]
        if isinstance(message, Submit | Abort):
            before = self._prompts.note(message)
            if before is not None and isinstance(message, Submit) and _shares_prompt(message, before):
                message, number = attrs.evolve(message, prompt_token_ids=[], block_keys=[]), SUBMIT_AGAIN
        body = self._encoder.encode(message)
        return _HEADER.pack(_HEADER.size - _LENGTH_BYTES + len(body), self._incarnation, number) + body

    async def send_all(self, messages: Iterable[WireMessage]) -> None:
        """Write messages in order, in pieces of little more than `MAX_WRITE_BYTES`. Raises PeerGone."""
        frames: list[bytes] = []
        num_bytes = 0
        try:
            for message in messages:
                frames.append(self.encode(message))
                num_bytes += len(frames[-1])
                if num_bytes >= MAX_WRITE_BYTES:
                    await self._stream.send_all(b"".join(frames))
                    frames.clear()
                    num_bytes = 0
            if frames:
                await self._stream.send_all(b"".join(frames))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the stream is closed") from error


class FrameReader:
    """Reads messages of one incarnation from a stream. One task at a time."""

    def __init__(self, stream: trio.abc.ReceiveStream, incarnation: int) -> None:
        self._stream = stream
        self._incarnation = incarnation
        self._buffer = bytearray()
        self._decoders = {number: msgspec.msgpack.Decoder(cls) for number, cls in WIRE_TYPES.items()}
        self._decoders[SUBMIT_AGAIN] = self._decoders[_NUMBERS[Submit]]
        self._prompts = Prompts()
        """Mirrors the writer's."""

    async def receive_all(self) -> list[WireMessage]:
        """Wait for a complete frame and take all complete ones. Raises PeerGone at end of file."""
        messages: list[WireMessage] = []
        while not messages:
            try:
                data = await self._stream.receive_some(1 << 20)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise PeerGone("the stream is broken") from error
            if not data:
                raise PeerGone("end of file")
            self._buffer += data
            messages = self._cut_frames()
        return messages

    def _decode(self, number: int, body: memoryview) -> WireMessage:
        message: WireMessage = self._decoders[number].decode(body)
        if number == SUBMIT_AGAIN and isinstance(message, Submit):
            before = self._prompts.last_of(message)
            if before is None:
                raise PeerGone("a message refers to a prompt that was not sent before")
            ids, keys = before.prompt_token_ids, before.block_keys
            message = attrs.evolve(message, prompt_token_ids=ids, block_keys=keys)
        if isinstance(message, Submit | Abort):
            self._prompts.note(message)
        return message

    def _cut_frames(self) -> list[WireMessage]:
        messages: list[WireMessage] = []
        buffer = memoryview(self._buffer)
        at = 0
        while len(buffer) - at >= _HEADER.size:
            length, incarnation, number = _HEADER.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                buffer.release()
                raise PeerGone(f"invalid frame of {length} bytes")
            end = at + _LENGTH_BYTES + length
            if end > len(buffer):
                break
            if incarnation == self._incarnation:
                messages.append(self._decode(number, buffer[at + _HEADER.size : end]))
            at = end
        buffer.release()
        del self._buffer[:at]
        return messages
