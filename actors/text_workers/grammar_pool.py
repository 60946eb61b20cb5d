"""Checks grammars for the tokenizer: small ones in threads, others in processes, so that they delay nobody.

Compiling takes up to a second of a processor. It lets go of the GIL, but in a thread it competes with the event loop at
the same priority, which a thread cannot give up: it would hold the GIL while it waits for a processor. A process
(`grammar_process.py`) has a low priority and can be killed. It is started when it is needed, and ended when it has been
idle for long.

What must always hold: a small grammar never waits for a large one; one tenant's grammars occupy at most half of the
processes; the queue is bounded; when `run` ends, no process is left.
"""

from __future__ import annotations

import attrs
import structlog
import trio

from ..config import RuntimeConfig
from ..messages.grammar import GrammarSpec
from ..messages.outcomes import ErrorKind, RequestError
from ..processes.idle_processes import IdleProcesses
from ..shared.grammar_library import load_grammars
from ..threads import run_in_thread
from ..tokenizer.grammar_check import GrammarChecker
from .fair_queue import FairQueue
from .grammar_process import GrammarProcess, ProcessGone
from .grammar_worker import WorkerSettings

log = structlog.get_logger()

SMALL_CHARACTERS = 2048
"""Of a grammar that is checked in a thread: JSON schemas take a millisecond or two, the worst that is known 30.

Most of that is spent on tokens that are drawn from it, for which `grammar_walk.MAX_WALKS_S` is the limit.
"""
MAX_THREADS = 2
MAX_PROCESSES = 2
MAX_PROCESSES_PER_TENANT = MAX_PROCESSES // 2
MAX_WAITING = 8192
"""Grammars that may wait for a process, half of them one tenant's: as many as there may be open requests."""
MAX_WAITING_BYTES = 256 << 20
"""Characters of their sources, likewise."""
IDLE_S = 60.0
"""How long a process may be idle. Starting one takes as long as loading the tokenizer."""
TIMEOUT_S = 10.0
TIMEOUT_FACTOR = 20.0
"""A process may take so much longer than a grammar's processor time: of a busy processor it gets a tenth."""

UNAVAILABLE = RequestError(ErrorKind.OVERLOADED, "The grammar could not be checked. Please try again later.")


@attrs.frozen
class WorkerSetup:
    """What a process needs."""

    tokenizer_json: bytes
    settings: WorkerSettings


@attrs.define(eq=False)
class _Job:
    spec: GrammarSpec
    tenant: str
    is_waiting: bool = True
    done: trio.Event = attrs.field(factory=trio.Event)
    result: str | RequestError = UNAVAILABLE


class GrammarPool:
    """Check grammars, and keep the results of the last ones (the tokenizer's `GrammarChecks`)."""

    def __init__(self, checker: GrammarChecker, setup: WorkerSetup | None = None) -> None:
        """Without `setup`, threads check grammars of any size."""
        self._checker = checker
        self._setup = setup
        self._threads = trio.CapacityLimiter(MAX_THREADS)
        self._queue: FairQueue[_Job] = FairQueue(MAX_WAITING, MAX_WAITING_BYTES)
        self._num_free = MAX_PROCESSES
        self._idle: IdleProcesses[GrammarProcess] = IdleProcesses(IDLE_S)
        self._nursery: trio.Nursery | None = None

    @property
    def idle_process_ids(self) -> list[int]:
        return self._idle.ids

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep processes as long as they are needed, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await self._idle.run()
        finally:  # once no task can put one back
            await self._idle.end_all()

    def known(self, spec: GrammarSpec) -> str | RequestError | None:
        return self._checker.known(spec)

    async def check(self, spec: GrammarSpec, tenant: str) -> str | RequestError:
        if self._setup is None or len(spec.source) <= SMALL_CHARACTERS:
            check = self._checker.check
            result = await run_in_thread(check, spec, limiter=self._threads, abandon_on_cancel=True)
            self._checker.keep(spec, result)
            return result
        job = _Job(spec, tenant)
        self._queue.put(tenant, job, len(spec.source))
        self._dispatch(self._setup)
        try:
            await job.done.wait()
        finally:
            if job.is_waiting:
                self._queue.drop(tenant, job)
        return job.result

    # ------------------------------------------------------------ processes

    def _dispatch(self, setup: WorkerSetup) -> None:
        """Let as many waiting grammars be checked as may be. They are checked even if their clients leave."""
        assert self._nursery is not None
        while self._num_free and (job := self._queue.take(MAX_PROCESSES_PER_TENANT)) is not None:
            self._num_free -= 1
            job.is_waiting = False
            self._nursery.start_soon(self._serve, job, setup)

    async def _serve(self, job: _Job, setup: WorkerSetup) -> None:
        known = self._checker.known(job.spec)  # another request may have had it checked meanwhile
        try:
            job.result = await self._check_apart(job.spec, setup) if known is None else known
        finally:
            self._num_free += 1
            self._queue.done(job.tenant)
            job.done.set()
        if job.result is not UNAVAILABLE:
            self._checker.keep(job.spec, job.result)
        self._dispatch(setup)

    async def _check_apart(self, spec: GrammarSpec, setup: WorkerSetup) -> str | RequestError:
        """Check a grammar in a process: in a new one if that which was idle has died, maybe before."""
        if (process := await self._idle.take()) is not None:
            result = await self._check_in(process, spec, setup)
            if not isinstance(result, ProcessGone) or result.exit_code is None:
                return _told(result, spec)
        try:
            process = await GrammarProcess.start(setup.tokenizer_json, setup.settings)
        except (OSError, ProcessGone) as error:
            log.error("grammar_worker.not_started", error=type(error).__name__)
            return UNAVAILABLE
        return _told(await self._check_in(process, spec, setup), spec)

    async def _check_in(
        self, process: GrammarProcess, spec: GrammarSpec, setup: WorkerSetup
    ) -> str | RequestError | ProcessGone:
        try:
            return await process.check(spec, TIMEOUT_S + TIMEOUT_FACTOR * setup.settings.max_seconds)
        except ProcessGone as gone:
            log.warning("grammar_worker.died", pid=process.pid, exit_code=gone.exit_code)
            return gone
        finally:
            await self._idle.put_back(process)


def _told(result: str | RequestError | ProcessGone, spec: GrammarSpec) -> str | RequestError:
    return result if not isinstance(result, ProcessGone) else result.verdict(spec) or UNAVAILABLE


def make_grammar_pool(tokenizer_json: bytes, config: RuntimeConfig, *, check_apart: bool) -> GrammarPool:
    """Return a server's pool. `check_apart`: check large grammars in processes of their own instead of threads."""
    grammars = load_grammars(tokenizer_json, config.engine.eos_token_ids)
    settings = WorkerSettings(config.engine.eos_token_ids, config.max_grammar_bytes, config.grammar_timeout_s)
    setup = WorkerSetup(tokenizer_json, settings) if check_apart and grammars is not None else None
    return GrammarPool(GrammarChecker(grammars, config.max_grammar_bytes, config.grammar_timeout_s), setup)
