"""Typed channel ends: in memory, or over a Unix socket, behind one interface.

    Channel     in memory, first in first out, bounded. Two ways in: `send` waits for one of `capacity` slots; `post`
                always has room and is for what must never wait (a scope that leaves, one answer a sequence). Its
                length is bounded by what may still be posted, as its caller says.
    FrameReader, FrameWriter
                the same messages over a stream socket, between the web process and the engine process. A frame is

                    length  4 bytes, of what follows
                    incarnation  4 bytes: which engine this concerns
                    type    2 bytes: a number of WIRE_TYPES, or SUBMIT_AGAIN
                    body    msgpack

                The prompt of a request's choices goes over once: a Submit that shares its lists with the one before it
                of its request is sent without them, and given the same lists at the other end.

What must always hold: what goes in comes out once, in order; a frame of another incarnation is dropped; the end of
the file is the peer's death, and says so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import attrs
import msgspec
import trio

from .messages.accountant import StepReport
from .messages.scheduler import Abort, ResetPrefixCache, Submit
from .messages.supervisor import Alive, EngineReady, EngineRefused

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sender(Protocol[T_contra]):
    async def send(self, item: T_contra, /) -> None:
        """Wait for a slot and put it in."""
        ...


class Poster(Protocol[T_contra]):
    def post(self, item: T_contra, /) -> None:
        """Put it in; there is always room."""
        ...


class Receiver(Protocol[T]):
    async def receive_all(self) -> list[T]:
        """Wait until there is something and take all of it, in order."""
        ...


class Channel(Generic[T]):
    """An in-memory channel with one receiver and any number of senders."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: items that may wait after `send`; those of `post` do not count."""
        if capacity < 1:
            raise ValueError(f"a channel needs room for one item at least, got capacity={capacity}")
        self._items: list[T] = []
        self._num_free_slots = capacity
        self._num_queued_slots = 0
        self._senders = trio.lowlevel.ParkingLot()
        self._receiver: trio.lowlevel.Task | None = None

    def __len__(self) -> int:
        return len(self._items)

    async def reserve(self) -> None:
        """Wait for a slot and keep it; `put_reserved` or `cancel_reservation` must follow. A checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._num_free_slots > 0:
            self._num_free_slots -= 1
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._senders.park()  # whoever frees a slot hands it over

    def put_reserved(self, item: T) -> None:
        """Use a slot that `reserve` gave."""
        self._num_queued_slots += 1
        self.post(item)

    def cancel_reservation(self) -> None:
        """Give a slot back unused."""
        self._free_slots(1)

    async def send(self, item: T, /) -> None:
        await self.reserve()
        self.put_reserved(item)

    def post(self, item: T, /) -> None:
        self._items.append(item)
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
        """What is there now, perhaps nothing."""
        items, self._items = self._items, []
        queued, self._num_queued_slots = self._num_queued_slots, 0
        self._free_slots(queued)
        return items

    def _free_slots(self, count: int) -> None:
        woken = len(self._senders.unpark(count=count)) if count else 0
        self._num_free_slots += count - woken

    async def _wait_item(self) -> None:
        if self._receiver is not None:
            raise trio.BusyResourceError("a channel has one receiver")
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


# ---------------------------------------------------------------- over a socket

WireMessage = Submit | Abort | ResetPrefixCache | EngineReady | EngineRefused | StepReport | Alive

WIRE_TYPES: dict[int, type[WireMessage]] = {
    1: Submit,
    2: Abort,
    3: EngineReady,
    4: StepReport,
    5: ResetPrefixCache,
    6: EngineRefused,
    8: Alive,
}
_NUMBERS = {cls: number for number, cls in WIRE_TYPES.items()}
SUBMIT_AGAIN = 7
"""A Submit whose prompt and keys are those of the Submit before it of its request."""
_HEADER = struct.Struct("<IIH")
_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""A longer frame is a broken peer."""
MAX_WRITE_BYTES = 1 << 18
"""Frames that are encoded before the loop has a turn: a request may have hundreds of long prompts."""


class Prompts:
    """The last Submit of each request of which others are to come: what both ends of a stream have seen."""

    def __init__(self) -> None:
        self._by_group: dict[int, Submit] = {}

    def __len__(self) -> int:
        return len(self._by_group)

    def last_of(self, message: Submit) -> Submit | None:
        return self._by_group.get(message.group_id)

    def note(self, message: Submit | Abort) -> Submit | None:
        """What `message` leaves to be shared. Returns the Submit before it of the same request."""
        if isinstance(message, Abort):
            return self._by_group.pop(message.sequence_id, None) if message.ends_group else None
        before = self._by_group.pop(message.group_id, None)
        if message.num_to_come:
            self._by_group[message.group_id] = message
        return before


def _shares_prompt(one: Submit, other: Submit) -> bool:
    return one.prompt_token_ids is other.prompt_token_ids and one.block_keys is other.block_keys


class PeerGone(Exception):
    """The other process closed its end, or died. Nothing more will come."""


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
        """Write them in order, `MAX_WRITE_BYTES` and a message at a time. Raises PeerGone."""
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
        """As the writer has them."""

    async def receive_all(self) -> list[WireMessage]:
        """Wait for a whole frame and take every whole one that is there. Raises PeerGone at the end of the file."""
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
                raise PeerGone("a prompt is said to have come before, and has not")
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
                raise PeerGone(f"a frame of {length} bytes")
            end = at + _LENGTH_BYTES + length
            if end > len(buffer):
                break
            if incarnation == self._incarnation:
                messages.append(self._decode(number, buffer[at + _HEADER.size : end]))
            at = end
        buffer.release()
        del self._buffer[:at]
        return messages
