"""The processes that render chats, and who waits for one.

Used by the tokenizer, as its `Renderer`. Each worker (`chat_worker.py`) renders one chat at a time; a chat that takes
longer than it may, or whose client has left, is ended with its process, in whose place another is started. So that a
few slow chats do not hold up the others, the pool starts one worker more whenever one has been busy for `SLOW_S`.

What must always hold: while fewer than MOST_WORKERS are busy, one that is quick, or about to start, is not held by a
tenant that holds others; what waits is bounded; when `run` ends no worker is left.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import socket
import subprocess

import attrs
import structlog
import trio

from ..messages.prompts import ChatPrompt
from ..processes.child import OWN_GROUP, command_of
from ..shared.checkpoint import CheckpointError
from ..tokenizer.chat_template import RenderedChat, TemplateError, TemplateSource, TooMuchText
from .chat_wire import ANSWER, PIECE_CHARACTERS, Kind, pack_chat, pack_source, read_answer, read_head
from .fair_queue import FairQueue
from .renderer import NO_TEMPLATE, does_not_compile

log = structlog.get_logger()

MODULE = "quipu.actors.text_workers.chat_worker"
QUICK_WORKERS = 2
"""That are idle, or were a moment ago: always so many, as far as MOST_WORKERS allows."""
MOST_WORKERS = 8
MOST_OF_ONE = MOST_WORKERS // 2
"""Workers that one tenant's chats may hold."""
SLOW_S = 0.1
"""A worker that has been busy for longer is not counted on, and steps back behind everything else that computes."""
SLOW_NICENESS = 19
LEFT_GRACE_S = 0.1
"""How long a chat may go on whose client has left: most end by themselves, and starting a process takes as long."""
MAX_WAITING = 8192
"""Chats that may wait for a worker, half of them one tenant's: as many as may be open."""
MAX_WAITING_BYTES = 512 << 20
"""Of their frames, likewise."""
SPARE_S = 10.0
"""How long a worker may be idle that is not needed any more."""
START_S = 60.0
"""How long an interpreter may take to start, on a machine with other things to do."""
RETRY_S = 1.0
"""After a worker that could not be started."""
READ_BYTES = 1 << 18

_TOO_SLOW = "the chat template took longer than {timeout_s:g} seconds for these messages"
_DIED = "the chat template ended the process that was rendering these messages"


@attrs.define(eq=False)
class _Job:
    """One chat on its way."""

    frames: list[bytes]
    tenant: str
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: RenderedChat | Exception | None = None
    scope: trio.CancelScope | None = None
    """While a worker has it."""
    is_waiting: bool = True


class _Gone(Exception):
    """A worker has closed its end."""


@attrs.define(eq=False)
class _Worker:
    process: trio.Process
    stream: trio.SocketStream
    job: _Job | None = None
    has_job: trio.Event = attrs.field(factory=trio.Event)
    is_slow: bool = False


class ChatPool:
    """Renders chats in processes of their own (see `rendering.Renderer`)."""

    def __init__(self, template: TemplateSource | None, timeout_s: float) -> None:
        self._template = template
        self._timeout_s = timeout_s
        self._queue: FairQueue[_Job] = FairQueue(MAX_WAITING, MAX_WAITING_BYTES)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._num_starting = 0
        self._nursery: trio.Nursery | None = None

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of those that run."""
        return [worker.process.pid for worker in self._workers]

    @property
    def num_busy(self) -> int:
        """Workers that have a chat."""
        return len(self._workers) - len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Chats that no worker has yet."""
        return self._queue.num_waiting

    # ------------------------------------------------------------ for the tokenizer

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep workers until cancelled; started once the first has compiled the template. Raises CheckpointError."""
        if self._template is None:
            task_status.started()
            await trio.sleep_forever()
            return
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._num_starting = 1
            await nursery.start(self._work, self._template)
            self._start_more()
            task_status.started()
            await trio.sleep_forever()

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        """A chat's text. Raises TemplateError, TooMuchText and Crowded."""
        if self._template is None:
            raise TemplateError(NO_TEMPLATE)
        job = _Job(await _packed(chat, max_characters), tenant)
        del chat
        self._queue.put(tenant, job, sum(map(len, job.frames)))
        self._dispatch()
        try:
            await job.done.wait()
        finally:
            self._leave(job)
        outcome, job.outcome = job.outcome, None
        if isinstance(outcome, RenderedChat):
            return outcome
        try:
            raise outcome or TemplateError(_DIED)
        finally:
            del outcome  # it knows this frame, and so the chat: nobody should have to find a cycle

    def _leave(self, job: _Job) -> None:
        """Nobody waits for a chat any more."""
        if job.is_waiting:
            self._queue.drop(job.tenant, job)
        elif job.scope is not None:
            job.scope.deadline = min(job.scope.deadline, trio.current_time() + LEFT_GRACE_S)

    # ------------------------------------------------------------ who renders what

    def _dispatch(self) -> None:
        most_of_one = max(1, min(MOST_OF_ONE, len(self._workers) - 1))
        while self._idle and (job := self._queue.take(most_of_one)) is not None:
            job.is_waiting = False
            worker = self._idle.pop()
            worker.job = job
            worker.has_job.set()

    def _start_more(self) -> None:
        """See that there are enough workers to count on."""
        assert self._template is not None and self._nursery is not None
        while True:
            num_quick = sum(not worker.is_slow for worker in self._workers) + self._num_starting
            if num_quick >= QUICK_WORKERS or len(self._workers) + self._num_starting >= MOST_WORKERS:
                return
            self._num_starting += 1
            self._nursery.start_soon(self._work, self._template)

    async def _work(
        self, template: TemplateSource, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Start one worker and give it chats until it dies, or is not needed any more."""
        is_first = task_status is not trio.TASK_STATUS_IGNORED
        try:
            worker = await self._hire(template)
        except (CheckpointError, OSError) as error:
            if is_first:
                raise
            # no memory or no process to be had, or no time: those that run go on
            log.error("chat_worker.not_started", error=type(error).__name__)
            await trio.sleep(RETRY_S)
            worker = None
        self._num_starting -= 1
        if worker is not None:
            self._workers.add(worker)
            task_status.started()
            try:
                await self._employ(worker)
            finally:
                self._workers.discard(worker)
                if worker in self._idle:
                    self._idle.remove(worker)
                await _dismiss(worker)
        self._start_more()
        self._dispatch()

    async def _employ(self, worker: _Worker) -> None:
        """Give a worker chats until it has gone, or is idle and not needed."""
        while True:
            worker.has_job = trio.Event()
            self._idle.append(worker)
            self._dispatch()
            while not worker.has_job.is_set():
                with trio.move_on_after(SPARE_S):
                    await worker.has_job.wait()
                if not worker.has_job.is_set() and self._is_spare():
                    return
            if not await self._serve(worker):
                return

    def _is_spare(self) -> bool:
        return sum(not worker.is_slow for worker in self._workers) > QUICK_WORKERS

    async def _serve(self, worker: _Worker) -> bool:
        """Have a worker render the chat that it was given. False: it cannot be used again."""
        job, worker.job = worker.job, None
        assert job is not None
        job.outcome = TemplateError(_TOO_SLOW.format(timeout_s=self._timeout_s))
        is_usable = False
        try:
            with trio.move_on_after(self._timeout_s) as job.scope:
                job.outcome = await self._converse(worker, job)
                is_usable = True
        except _Gone:
            job.outcome = TemplateError(_DIED)
        finally:
            job.frames.clear()
            job.scope = None
            job.done.set()
            is_usable = is_usable and not worker.is_slow  # who has stepped back cannot step forward again
            worker.is_slow = False
            self._queue.done(job.tenant)
            self._dispatch()  # its tenant may have held as many workers as it may, with others idle
        return is_usable

    async def _converse(self, worker: _Worker, job: _Job) -> RenderedChat | Exception:
        """Raises _Gone."""
        link = _Link(worker.stream, job.frames)
        with trio.move_on_after(SLOW_S) as quick:
            await link.send()
            await link.fill(ANSWER.size)
        if quick.cancelled_caught:
            worker.is_slow = True
            _step_back(worker.process)
            self._start_more()
            await link.send()
            await link.fill(ANSWER.size)
        try:
            head = read_head(link.take(ANSWER.size))
            await link.fill(head.num_mark_bytes)
            marks = link.take(head.num_mark_bytes)
            return read_answer(head, marks, await link.text(head.num_bytes))
        except (TemplateError, TooMuchText) as error:  # what the worker said of this chat
            return error
        except ValueError:
            raise _Gone from None

    async def _hire(self, template: TemplateSource) -> _Worker:
        """Start a process and have it compile the template. Raises CheckpointError and OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        try:
            process = await trio.lowlevel.open_process(
                command_of(MODULE), stdin=theirs, stdout=subprocess.DEVNULL, process_group=OWN_GROUP
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _Worker(process, stream)
        reason: str | None = None
        is_ready = False
        try:
            with trio.move_on_after(START_S + self._timeout_s):
                reason = await self._introduce(worker, template)
                is_ready = reason is None
        finally:
            if not is_ready:
                await _dismiss(worker)
        if is_ready:
            return worker
        raise does_not_compile(template, reason or f"it takes longer than {self._timeout_s:g} seconds")

    async def _introduce(self, worker: _Worker, template: TemplateSource) -> str | None:
        """Hand the template over; why it cannot be used, or None."""
        link = _Link(worker.stream, [pack_source(template, self._timeout_s)])
        try:
            await link.send()
            await link.fill(ANSWER.size)
            head = read_head(link.take(ANSWER.size))
            text = await link.text(head.num_bytes)
        except _Gone:
            code = await worker.process.wait()
            if code == -signal.SIGALRM:
                return f"it takes longer than {self._timeout_s:g} seconds"
            return f"it ends the process that compiles it (exit code {code})"
        return None if head.kind is Kind.READY else text


def _step_back(process: trio.Process) -> None:
    """Let everything else that computes go first."""
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process.pid, SLOW_NICENESS)


class _Link:
    """One exchange with a worker. `send` and `fill` may be cancelled and called again."""

    def __init__(self, stream: trio.SocketStream, frames: list[bytes]) -> None:
        self._socket = stream.socket
        self._frames = frames
        self._num_frames = 0
        self._num_sent = 0
        """Bytes of the frame that is being sent."""
        self._data = bytearray()

    async def send(self) -> None:
        """Send what has not been sent. Raises _Gone."""
        while self._num_frames < len(self._frames):
            frame = self._frames[self._num_frames]
            while self._num_sent < len(frame):
                try:
                    self._num_sent += await self._socket.send(memoryview(frame)[self._num_sent :])
                except OSError:
                    raise _Gone from None
            self._num_frames, self._num_sent = self._num_frames + 1, 0

    async def fill(self, num_bytes: int) -> None:
        """Wait until so many bytes are there. Raises _Gone."""
        while len(self._data) < num_bytes:
            try:
                data = await self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise _Gone
            self._data += data

    def take(self, num_bytes: int) -> bytes:
        taken = bytes(self._data[:num_bytes])
        del self._data[:num_bytes]
        return taken

    async def text(self, num_bytes: int) -> str:
        """The text of the next bytes, decoded as they come. Raises _Gone."""
        decode = codecs.getincrementaldecoder("utf-8")().decode
        pieces: list[str] = []
        while num_bytes > 0:
            await self.fill(1)
            piece = self.take(min(num_bytes, len(self._data)))
            num_bytes -= len(piece)
            pieces.append(decode(piece, num_bytes == 0))
        return "".join(pieces)


async def _packed(chat: ChatPrompt, max_characters: int) -> list[bytes]:
    """The frames of a chat, made a few milliseconds at a time. Raises TemplateError."""
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
        raise TemplateError(f"these messages cannot be rendered: {error}") from error
    return frames


async def _dismiss(worker: _Worker) -> None:
    """End a worker, whatever it does."""
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(worker.stream)
        worker.process.kill()
        await worker.process.wait()
