"""Messages over the stream socket between the web process and the engine process.

`FrameWriter` and `FrameReader` are the two ends of one direction. A frame is

    length  4 bytes, of what follows
    incarnation  4 bytes: which engine this concerns
    type    2 bytes: a number of WIRE_TYPES, SUBMIT_AGAIN, ONE_EACH or PROMPT_PART
    body    msgpack

A long prompt comes in parts before its message, since to decode a million token ids in one piece takes 30 ms.
The prompt of a request with several choices is sent once: a Submit that shares its lists with the previous one of its
request is sent without them, and gets the same lists at the other end. A report of a step of many sequences of which
each got one token is sent without the sequences of the tokens.

What must always hold: messages are received once, in order; frames of older incarnations are only counted; end of file
means that the peer is gone, and anything else that is not a message of this incarnation means that it is broken. Both
are reported after the messages before them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator

import attrs
import msgspec
import trio

from ..messages.accountant import StepReport
from ..messages.block_manager import LookUp
from ..messages.engine_adapters import AdapterLoaded, KeepAdapters, LoadAdapter, UnloadAdapter
from ..messages.handler import LookedUp
from ..messages.peers import EndFetch, Fetch
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from ..messages.supervisor import EngineReady, EngineRefused, Heartbeat

WireMessage = (
    Submit
    | Abort
    | ResetPrefixCache
    | LookUp
    | Fetch
    | EndFetch
    | EngineReady
    | EngineRefused
    | StepReport
    | LookedUp
    | Heartbeat
    | KeepAdapters
    | LoadAdapter
    | UnloadAdapter
    | AdapterLoaded
)

WithPrompt = Submit | LookUp | Fetch
"""Messages with `prompt_token_ids`."""
WIRE_TYPES: dict[int, type[WireMessage]] = {
    1: Submit,
    2: Abort,
    3: EngineReady,
    4: StepReport,
    5: ResetPrefixCache,
    6: EngineRefused,
    8: Heartbeat,
    9: LookUp,
    10: LookedUp,
    12: Fetch,
    13: EndFetch,
    14: KeepAdapters,
    15: LoadAdapter,
    16: UnloadAdapter,
    17: AdapterLoaded,
}
_NUMBERS = {cls: number for number, cls in WIRE_TYPES.items()}
SUBMIT_AGAIN = 7
"""Type of a Submit whose prompt and keys are those of the previous Submit of its request."""
ONE_EACH = 11
"""Type of a StepReport whose tokens are one each of the sequences of its spans, in the same order."""
PROMPT_PART = 18
"""Type of a list of the first or the next token ids of the prompt of the next message."""
PART_IDS = 1 << 15
"""Token ids in a part: half a millisecond to encode, or to decode."""
MAX_PARTS_IDS = 1 << 26
"""Token ids in all parts of a prompt: no more than a single frame could have."""
MIN_ONE_EACH = 64
"""Sequences from which on this saves more time than it takes."""
_HEADER = struct.Struct("<IIH")
_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""Longest valid frame; a peer that sends a longer one is broken."""
MIN_FRAME_BYTES = _HEADER.size - _LENGTH_BYTES
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


def _has_one_each(report: StepReport) -> bool:
    return len(report.span_ids) >= MIN_ONE_EACH and report.token_sequence_ids == report.span_ids


def _shares_prompt(one: Submit, other: Submit) -> bool:
    return one.prompt_token_ids is other.prompt_token_ids and one.block_keys is other.block_keys


class PeerGone(Exception):
    """The other process closed its end or died. No further messages will be received."""


class Unreadable(Exception):
    """The other process sent what is not a message. What follows cannot be read either."""


async def receive_some(stream: trio.abc.ReceiveStream, max_bytes: int) -> bytes | bytearray:
    """Do as `stream.receive_some`, but wait until a socket is readable: a vain attempt costs as much as a message."""
    if not isinstance(stream, trio.SocketStream):
        return await stream.receive_some(max_bytes)
    descriptor = stream.socket.fileno()
    if descriptor < 0:
        raise trio.ClosedResourceError("this stream was closed")
    while True:
        await trio.lowlevel.wait_readable(descriptor)  # raises trio.ClosedResourceError if it is closed meanwhile
        try:
            return os.read(descriptor, max_bytes)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


class FrameWriter:
    """Sends messages of one incarnation down a stream. One task at a time."""

    def __init__(self, stream: trio.abc.SendStream, incarnation: int) -> None:
        self._stream = stream
        self._incarnation = incarnation
        self._encoder = msgspec.msgpack.Encoder()
        self._prompts = Prompts()
        self.is_writing = False
        self.num_written = 0
        """Pieces that the stream has taken."""

    def encode(self, message: WireMessage) -> bytes:
        return b"".join(self._frames(message))

    def _frames(self, message: WireMessage) -> Iterator[bytes]:
        number = _NUMBERS[type(message)]
        if isinstance(message, Submit | Abort):
            before = self._prompts.note(message)
            if before is not None and isinstance(message, Submit) and _shares_prompt(message, before):
                message, number = attrs.evolve(message, prompt_token_ids=[], block_keys=[], images=()), SUBMIT_AGAIN
        elif isinstance(message, StepReport) and _has_one_each(message):
            message, number = msgspec.structs.replace(message, token_sequence_ids=[]), ONE_EACH
        if isinstance(message, WithPrompt) and len(ids := message.prompt_token_ids) > PART_IDS:
            for start in range(0, len(ids), PART_IDS):
                yield self._frame(PROMPT_PART, ids[start : start + PART_IDS])
            message = attrs.evolve(message, prompt_token_ids=[])
        yield self._frame(number, message)

    def _frame(self, number: int, content: WireMessage | list[int]) -> bytes:
        body = self._encoder.encode(content)
        return _HEADER.pack(MIN_FRAME_BYTES + len(body), self._incarnation, number) + body

    async def send_all(self, messages: Iterable[WireMessage]) -> None:
        """Write messages in order, in pieces of little more than `MAX_WRITE_BYTES`. Raises PeerGone."""
        frames: list[bytes] = []
        num_bytes = 0
        self.is_writing = True
        try:
            for message in messages:
                for frame in self._frames(message):
                    frames.append(frame)
                    num_bytes += len(frame)
                    if num_bytes >= MAX_WRITE_BYTES:
                        await self._stream.send_all(b"".join(frames))
                        self.num_written += 1
                        frames.clear()
                        num_bytes = 0
            if frames:
                await self._stream.send_all(b"".join(frames))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the stream is closed") from error
        finally:
            self.is_writing = False


class FrameReader:
    """Reads messages of one incarnation from a stream. One task at a time."""

    def __init__(
        self, stream: trio.abc.ReceiveStream, incarnation: int, on_stale: Callable[[int], object] = lambda _: None
    ) -> None:
        """`on_stale` is called with a number of frames of older incarnations."""
        self.incarnation = incarnation
        self._on_stale = on_stale
        self._stream = stream
        self._buffer = bytearray()
        self._decoders = {number: msgspec.msgpack.Decoder(cls) for number, cls in WIRE_TYPES.items()}
        self._decoders[SUBMIT_AGAIN] = self._decoders[_NUMBERS[Submit]]
        self._decoders[ONE_EACH] = self._decoders[_NUMBERS[StepReport]]
        self._part_decoder = msgspec.msgpack.Decoder(list[int])
        self._parts: list[int] = []
        """Of the prompt of the next message."""
        self._prompts = Prompts()
        self._fault: Unreadable | None = None

    async def receive_all(self) -> list[WireMessage]:
        """Wait for a complete frame and take all complete ones. Raises PeerGone at end of file, and Unreadable."""
        messages: list[WireMessage] = []
        while not messages:
            if self._fault is not None:
                raise self._fault
            try:
                data = await receive_some(self._stream, 1 << 20)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise PeerGone("the stream is broken") from error
            if not data:
                raise PeerGone("end of file")
            self._buffer += data
            messages = self._cut_frames()
        return messages

    def _decode(self, number: int, body: memoryview) -> WireMessage | None:
        """Return a message, or None for a part of one."""
        try:
            if number == PROMPT_PART:
                self._parts += self._part_decoder.decode(body)
                if len(self._parts) > MAX_PARTS_IDS:
                    raise ValueError(f"a prompt of more than {MAX_PARTS_IDS} tokens")
                return None
            message: WireMessage = self._decoders[number].decode(body)
        except (KeyError, ValueError, RecursionError, MemoryError, msgspec.MsgspecError) as error:
            raise Unreadable(f"a message of type {number}: {type(error).__name__}: {error}") from error
        if number == SUBMIT_AGAIN and isinstance(message, Submit):
            before = self._prompts.last_of(message)
            if before is None:
                raise Unreadable("a message refers to a prompt that was not sent before")
            ids, keys, images = before.prompt_token_ids, before.block_keys, before.images
            message = attrs.evolve(message, prompt_token_ids=ids, block_keys=keys, images=images)
        if self._parts:
            if not isinstance(message, WithPrompt) or message.prompt_token_ids:
                raise Unreadable(f"a message of type {number} after parts of a prompt")
            message, self._parts = attrs.evolve(message, prompt_token_ids=self._parts), []
        if isinstance(message, Submit | Abort):
            self._prompts.note(message)
        if number == ONE_EACH and isinstance(message, StepReport):
            message = msgspec.structs.replace(message, token_sequence_ids=message.span_ids)
        return message

    def _cut_frames(self) -> list[WireMessage]:
        messages: list[WireMessage] = []
        at = num_stale = 0
        with memoryview(self._buffer) as buffer:
            while len(buffer) - at >= _HEADER.size:
                length, incarnation, number = _HEADER.unpack_from(buffer, at)
                end = at + _LENGTH_BYTES + length
                try:
                    if not MIN_FRAME_BYTES <= length <= MAX_FRAME_BYTES:
                        raise Unreadable(f"a frame of {length} bytes")
                    if incarnation > self.incarnation:
                        raise Unreadable(f"a frame of engine {incarnation}, and this is engine {self.incarnation}")
                    if end > len(buffer):
                        break
                    if incarnation < self.incarnation:
                        num_stale += 1
                        at = end
                        continue
                    message = self._decode(number, buffer[at + _HEADER.size : end])
                except Unreadable as error:
                    self._fault = error
                    return messages
                if message is not None:
                    messages.append(message)
                at = end
        del self._buffer[:at]
        if num_stale:
            self._on_stale(num_stale)
        return messages
