"""One process that renders chats, seen from the web process.

Used by `chat_pool.py`. The process runs `chat_worker.py`; `chat_wire.py` has the messages.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal

import attrs
import trio

from ..messages.prompts import ChatPrompt
from ..tokenizer.chat_template import ChatTooLong, RenderedChat, TemplateError
from ..tokenizer.template_source import TemplateSource
from .chat_wire import ANSWER, PIECE_CHARACTERS, ChatAnswer, pack_chat, pack_source, read_answer, read_head
from .child_start import start_child
from .renderer import does_not_compile

MODULE = "quipu.actors.text_workers.chat_worker"
LOW_PRIORITY_NICENESS = 19
START_S = 60.0
"""How long an interpreter may take to start, on a busy machine."""
READ_BYTES = 1 << 18


class ProcessGone(Exception):
    """The process has closed its end of the socket."""


@attrs.frozen(eq=False)
class ChatProcess:
    """A process that has compiled the chat template."""

    _process: trio.Process
    _stream: trio.SocketStream

    @classmethod
    async def start(cls, template: TemplateSource, timeout_s: float) -> ChatProcess:
        """Start a process and have it compile the template. Raises CheckpointError and OSError."""
        started = cls(*await start_child(MODULE))
        reason: str | None = None
        is_ready = False
        try:
            with trio.move_on_after(START_S + timeout_s):
                reason = await started._compile(template, timeout_s)
                is_ready = reason is None
        finally:
            if not is_ready:
                await started.end()
        if is_ready:
            return started
        raise does_not_compile(template, reason or f"it takes longer than {timeout_s:g} seconds")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exchange(self, frames: list[bytes]) -> Exchange:
        """Prepare to send one chat. `frames` may be cleared afterwards."""
        return Exchange(self._stream, frames)

    def lower_priority(self) -> None:
        """Let everything else run first. This cannot be undone."""
        with contextlib.suppress(OSError):  # the process has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOW_PRIORITY_NICENESS)

    async def end(self) -> None:
        """Kill the process, whatever it is doing."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)
            self._process.kill()
            await self._process.wait()

    async def _compile(self, template: TemplateSource, timeout_s: float) -> str | None:
        """Send the template. Return why it cannot be used, or None."""
        exchange = self.exchange([pack_source(template, timeout_s)])
        try:
            await exchange.send_and_await_answer()
            head = read_head(exchange.take(ANSWER.size))
            text = await exchange.text(head.num_bytes)
        except ProcessGone:
            code = await self._process.wait()
            if code == -signal.SIGALRM:
                return f"it takes longer than {timeout_s:g} seconds"
            return f"it ends the process that compiles it (exit code {code})"
        return None if head.kind is ChatAnswer.READY else text


class Exchange:
    def __init__(self, stream: trio.SocketStream, frames: list[bytes]) -> None:
        self._socket = stream.socket
        self._frames = frames
        self._num_frames = 0
        self._num_sent = 0
        """Bytes sent of the current frame."""
        self._data = bytearray()

    async def send_and_await_answer(self) -> None:
        """Send the message and wait for the head of the answer. If cancelled, call it again to go on.

        Raises ProcessGone.
        """
        while self._num_frames < len(self._frames):
            frame = self._frames[self._num_frames]
            while self._num_sent < len(frame):
                try:
                    self._num_sent += await self._socket.send(memoryview(frame)[self._num_sent :])
                except OSError:
                    raise ProcessGone from None
            self._num_frames, self._num_sent = self._num_frames + 1, 0
        await self._fill(ANSWER.size)

    async def rendered(self) -> RenderedChat:
        """Return the chat that the process has rendered.

        Raises TemplateError and ChatTooLong, which the process reported, and ProcessGone.
        """
        try:
            head = read_head(self.take(ANSWER.size))
            await self._fill(head.num_mark_bytes)
            marks = self.take(head.num_mark_bytes)
            return read_answer(head, marks, await self.text(head.num_bytes))
        except (TemplateError, ChatTooLong):
            raise
        except ValueError:
            raise ProcessGone from None

    def take(self, num_bytes: int) -> bytes:
        taken = bytes(self._data[:num_bytes])
        del self._data[:num_bytes]
        return taken

    async def text(self, num_bytes: int) -> str:
        """Receive and decode the next bytes. Raises ProcessGone."""
        decode = codecs.getincrementaldecoder("utf-8")().decode
        pieces: list[str] = []
        while num_bytes > 0:
            await self._fill(1)
            piece = self.take(min(num_bytes, len(self._data)))
            num_bytes -= len(piece)
            pieces.append(decode(piece, num_bytes == 0))
        return "".join(pieces)

    async def _fill(self, num_bytes: int) -> None:
        """Wait until `num_bytes` have been received. Raises ProcessGone."""
        while len(self._data) < num_bytes:
            try:
                data = await self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise ProcessGone
            self._data += data


async def pack_in_slices(chat: ChatPrompt, max_characters: int) -> list[bytes]:
    """Return the frames of a chat, made a few milliseconds at a time. Raises TemplateError."""
    frames: list[bytes] = []
    num_bytes = 0
    try:
        for frame in pack_chat(chat, max_characters):
            frames.append(frame)
            num_bytes += len(frame)
            if num_bytes > PIECE_CHARACTERS:
                num_bytes = 0
                await trio.lowlevel.checkpoint()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TemplateError(f"These messages cannot be rendered: {error}") from error
    return frames
