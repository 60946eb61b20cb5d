"""The pool of processes that render chats, and the queue for them (a `Renderer`).

Each process (`chat_process.py`) renders one chat at a time. A chat that exceeds its time limit, or whose client has
left, is ended with its process, which is then replaced. Whenever a process has been busy for `SLOW_S`, the pool starts
another, so that slow chats do not hold up the others.

What must always hold: while fewer than `MAX_WORKERS` are busy, one worker is quick or about to start and is not held by
a tenant that holds others; the queue is bounded; when `run` ends, no process is left.
"""

from __future__ import annotations

import attrs
import structlog
import trio

from ..messages.prompts import ChatPrompt
from ..shared.checkpoint import CheckpointError
from ..shared.fair_queue import FairQueue
from ..tokenizer.chat_template import ChatTooLong, RenderedChat, TemplateError
from ..tokenizer.template_source import TemplateSource
from .chat_process import ChatProcess, ProcessGone, pack_in_slices
from .renderer import NO_TEMPLATE

log = structlog.get_logger()

QUICK_WORKERS = 2
"""Workers that are idle or have just become busy: the pool keeps this many, if `MAX_WORKERS` allows."""
MAX_WORKERS = 8
MAX_WORKERS_PER_TENANT = MAX_WORKERS // 2
SLOW_S = 0.1
"""A worker that has been busy for longer is slow: it is replaced, and gets a low priority."""
CANCEL_GRACE_S = 0.1
"""How long a chat may go on after its client left: most end by themselves, and a new process takes as long."""
MAX_WAITING = 8192
"""Chats that may wait for a worker, half of them one tenant's: as many as there may be open requests."""
MAX_WAITING_BYTES = 512 << 20
"""Bytes of their frames, likewise."""
IDLE_S = 10.0
"""How long a worker may be idle when it is not needed."""
RETRY_S = 1.0
"""How long to wait after a worker could not be started."""

_TIMED_OUT = "The chat template took longer than {timeout_s:g} seconds for these messages."
_DIED = "The chat template ended the process that was rendering these messages."


@attrs.define(eq=False)
class _Job:
    frames: list[bytes]
    tenant: str
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: RenderedChat | Exception | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """In which a worker renders it; its client may leave before the worker enters it."""
    is_waiting: bool = True


@attrs.define(eq=False)
class _Worker:
    process: ChatProcess
    job: _Job | None = None
    has_job: trio.Event = attrs.field(factory=trio.Event)
    is_slow: bool = False


class ChatPool:
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
        return [worker.process.pid for worker in self._workers]

    @property
    def num_busy(self) -> int:
        return len(self._workers) - len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Chats that no worker has taken yet."""
        return self._queue.num_waiting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep workers running until cancelled. It reports as started once the first has compiled the template.

        Raises CheckpointError.
        """
        if self._template is None:
            task_status.started()
            await trio.sleep_forever()
            return
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._num_starting = 1
            await nursery.start(self._run_worker, self._template)
            self._start_workers()
            task_status.started()
            await trio.sleep_forever()

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        if self._template is None:
            raise TemplateError(NO_TEMPLATE)
        job = _Job(await pack_in_slices(chat, max_characters), tenant)
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
            del outcome  # it refers to this frame, and so to the chat: avoid a reference cycle

    def _leave(self, job: _Job) -> None:
        if job.is_waiting:
            self._queue.drop(job.tenant, job)
        else:
            job.scope.deadline = min(job.scope.deadline, trio.current_time() + CANCEL_GRACE_S)

    # ------------------------------------------------------------ workers

    def _dispatch(self) -> None:
        max_per_tenant = max(1, min(MAX_WORKERS_PER_TENANT, len(self._workers) - 1))
        while self._idle and (job := self._queue.take(max_per_tenant)) is not None:
            job.is_waiting = False
            worker = self._idle.pop()
            worker.job = job
            worker.has_job.set()

    def _start_workers(self) -> None:
        """Start workers until there are enough quick ones."""
        assert self._template is not None and self._nursery is not None
        while True:
            num_quick = self._num_quick() + self._num_starting
            if num_quick >= QUICK_WORKERS or len(self._workers) + self._num_starting >= MAX_WORKERS:
                return
            self._num_starting += 1
            self._nursery.start_soon(self._run_worker, self._template)

    def _num_quick(self) -> int:
        return sum(not worker.is_slow for worker in self._workers)

    async def _run_worker(
        self, template: TemplateSource, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Start a worker and give it chats until it dies or is not needed any more."""
        is_first = task_status is not trio.TASK_STATUS_IGNORED
        try:
            worker = _Worker(await ChatProcess.start(template, self._timeout_s))
        except (CheckpointError, OSError, MemoryError) as error:
            if is_first:
                raise
            # no memory, no process or no time: carry on with the other workers
            log.error("chat_worker.not_started", error=type(error).__name__)
            await trio.sleep(RETRY_S)
            worker = None
        self._num_starting -= 1
        if worker is not None:
            self._workers.add(worker)
            task_status.started()
            try:
                await self._serve_chats(worker)
            finally:
                self._workers.discard(worker)
                if worker in self._idle:
                    self._idle.remove(worker)
                await worker.process.end()
        self._start_workers()
        self._dispatch()

    async def _serve_chats(self, worker: _Worker) -> None:
        """Give a worker chats until it cannot be used again, or is idle and not needed."""
        while True:
            worker.has_job = trio.Event()
            self._idle.append(worker)
            self._dispatch()
            while not worker.has_job.is_set():
                with trio.move_on_after(IDLE_S):
                    await worker.has_job.wait()
                if not worker.has_job.is_set() and self._num_quick() > QUICK_WORKERS:
                    return
            if worker.process.has_ended:
                self._give_back(worker)
                return
            if not await self._serve_chat(worker):
                return

    def _give_back(self, worker: _Worker) -> None:
        """Return a chat to the queue, for another worker: something has killed this one while it was idle."""
        job, worker.job = worker.job, None
        assert job is not None
        log.warning("chat_worker.died", pid=worker.process.pid)
        job.is_waiting = True
        self._queue.put_back(job.tenant, job)

    async def _serve_chat(self, worker: _Worker) -> bool:
        """Have a worker render its chat. Return whether it can be used again."""
        job, worker.job = worker.job, None
        assert job is not None
        job.outcome = TemplateError(_TIMED_OUT.format(timeout_s=self._timeout_s))
        is_usable = False
        try:
            job.scope.deadline = min(job.scope.deadline, trio.current_time() + self._timeout_s)
            with job.scope:
                job.outcome = await self._render(worker, job)
                is_usable = True
        except (ProcessGone, MemoryError):
            job.outcome = TemplateError(_DIED)
        finally:
            job.frames.clear()
            job.done.set()
            is_usable = is_usable and not worker.is_slow  # a lowered priority cannot be raised again
            worker.is_slow = False
            self._queue.done(job.tenant)
            self._dispatch()  # its tenant may have been at its limit while other workers were idle
        return is_usable

    async def _render(self, worker: _Worker, job: _Job) -> RenderedChat | Exception:
        """Return the rendered chat, or the exception that the worker reported. Raises ProcessGone."""
        exchange = worker.process.exchange(job.frames)
        with trio.move_on_after(SLOW_S) as quick:
            await exchange.send_and_await_answer()
        if quick.cancelled_caught:
            worker.is_slow = True
            worker.process.lower_priority()
            self._start_workers()
            await exchange.send_and_await_answer()
        try:
            return await exchange.rendered()
        except (TemplateError, ChatTooLong) as error:
            return error
