"""Checks grammars for the tokenizer in processes of their own, so that they delay nobody and can be ended.

Compiling takes up to a second of a processor, and some grammars never end. A thread would compete with the event loop
and could not be stopped; a process (`grammar_process.py`) has a low priority and can be killed. There are two lanes: a
grammar that is not large begins in the first, where it has little time; those that need more, and large ones, are
checked in the second.

What must always hold: a grammar that is quickly checked never waits for one that is not; one tenant's grammars occupy
at most half of the processes of a lane; the queues are bounded; when `run` ends, no process is left.
"""

from __future__ import annotations

import json

import attrs
import structlog
import trio

from ..config.runtime_config import RuntimeConfig
from ..fleet.forks.fork_server import ForkServer
from ..fleet.processes.child import NICENESS
from ..fleet.processes.idle_processes import IdleProcesses
from ..grammars.grammar_check import GrammarChecker
from ..grammars.grammar_library import load_grammars
from ..messages.grammar import GrammarSpec
from ..messages.outcomes import ErrorKind, RequestError
from ..shared.fair_queue import FairQueue
from ..threads import run_in_thread
from ..tokenizer.prompt_encoder import EncodingOptions
from .grammar_process import GrammarProcess, ProcessGone
from .grammar_worker import WorkerSettings
from .known_grammars import KnownGrammars

log = structlog.get_logger()

MODULE = "quipu.actors.text_workers.grammar_worker"
SMALL_CHARACTERS = 2048
"""Of a grammar that begins in the first lane: JSON schemas take a millisecond or two."""
FIRST_LANE_S = 0.1
"""Processor time of a grammar in the first lane, most of it for tokens that are drawn from the grammar."""
GRACE_S = 1.0
"""Processor time between the limit, at which a process refuses the grammar, and its end by the kernel."""
MAX_PROCESSES = 2
"""In each lane."""
MAX_PROCESSES_PER_TENANT = MAX_PROCESSES // 2
MAX_WAITING = 8192
"""Grammars that may wait in a lane, half of them one tenant's: as many as there may be open requests."""
MAX_WAITING_BYTES = 256 << 20
"""Characters of their sources, likewise."""
IDLE_S = 60.0
"""How long a process may be idle."""
TIMEOUT_S = 10.0
TIMEOUT_FACTOR = 20.0
"""Multiple of a grammar's processor time that a process may take: it gets a tenth of a busy processor."""

UNAVAILABLE = RequestError(ErrorKind.OVERLOADED, "The grammar could not be checked. Please try again later.")

Verdict = str | RequestError | ProcessGone


@attrs.define(eq=False)
class _Job:
    spec: GrammarSpec
    options: EncodingOptions
    is_waiting: bool = True
    done: trio.Event = attrs.field(factory=trio.Event)
    result: Verdict = UNAVAILABLE


@attrs.define(eq=False)
class _Lane:
    limit_s: float
    """Processor time after which the kernel ends a process."""
    queue: FairQueue[_Job] = attrs.field(factory=lambda: FairQueue(MAX_WAITING, MAX_WAITING_BYTES))
    num_free: int = MAX_PROCESSES


class GrammarPool:
    """Check grammars, and keep the results of the last ones (the tokenizer's `GrammarChecks`)."""

    def __init__(self, tokenizer_json: bytes, settings: WorkerSettings) -> None:
        self._tokenizer_json = tokenizer_json
        self._settings = settings
        self._known = KnownGrammars(settings.max_bytes)
        self._first = _Lane(FIRST_LANE_S)
        self._second = _Lane(settings.max_seconds + GRACE_S)
        self._idle: IdleProcesses[GrammarProcess] = IdleProcesses(IDLE_S)
        self._server: ForkServer | None = None
        self._starting = trio.Lock()
        self._nursery: trio.Nursery | None = None

    @property
    def idle_process_ids(self) -> list[int]:
        return self._idle.ids

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep processes as long as they are needed, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._warm_up)
                task_status.started()
                await self._idle.run()
        finally:  # once no task can put one back
            await self._idle.end_all()
            if self._server is not None:
                with trio.CancelScope(shield=True):
                    await run_in_thread(self._server.end)

    def known(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError | None:
        return self._known.find(spec, options)

    async def check(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError:
        is_small = len(spec.source) <= SMALL_CHARACTERS
        result = await self._check_in_turn(self._first if is_small else self._second, spec, options)
        if is_small and isinstance(result, ProcessGone) and result.was_slow:
            result = await self._check_in_turn(self._second, spec, options)
        if isinstance(result, ProcessGone):
            result = result.verdict(spec) or UNAVAILABLE
        if result is not UNAVAILABLE:
            self._known.keep(spec, options, result)
        return result

    async def _check_in_turn(self, lane: _Lane, spec: GrammarSpec, options: EncodingOptions) -> Verdict:
        job = _Job(spec, options)
        lane.queue.put(options.tenant, job, len(spec.source))
        self._dispatch(lane)
        try:
            await job.done.wait()
        finally:
            if job.is_waiting:
                lane.queue.drop(options.tenant, job)
        return job.result

    # ------------------------------------------------------------ processes

    def _dispatch(self, lane: _Lane) -> None:
        """Start checking as many waiting grammars as allowed, which goes on even if their clients leave."""
        assert self._nursery is not None
        while lane.num_free and (job := lane.queue.take(MAX_PROCESSES_PER_TENANT)) is not None:
            lane.num_free -= 1
            job.is_waiting = False
            self._nursery.start_soon(self._serve, lane, job)

    async def _serve(self, lane: _Lane, job: _Job) -> None:
        known = self._known.find(job.spec, job.options)  # another request may have had it checked meanwhile
        try:
            job.result = await self._check_apart(job.spec, lane.limit_s) if known is None else known
        finally:
            lane.num_free += 1
            lane.queue.done(job.options.tenant)
            job.done.set()
        if not isinstance(job.result, ProcessGone) and job.result is not UNAVAILABLE:
            self._known.keep(job.spec, job.options, job.result)
        self._dispatch(lane)

    async def _check_apart(self, spec: GrammarSpec, limit_s: float) -> Verdict:
        """Check a grammar in an idle process, or in a new one if that process has died."""
        if (process := await self._idle.take()) is not None:
            result = await self._check_in(process, spec, limit_s)
            if not isinstance(result, ProcessGone) or result.exit_code is None or result.was_slow:
                return result
        try:
            process = await GrammarProcess.start(await self._running_server())
        except (OSError, RuntimeError) as error:
            log.error("grammar_worker.not_started", error=type(error).__name__)
            return UNAVAILABLE
        return await self._check_in(process, spec, limit_s)

    async def _check_in(self, process: GrammarProcess, spec: GrammarSpec, limit_s: float) -> Verdict:
        try:
            return await process.check(spec, limit_s, TIMEOUT_S + TIMEOUT_FACTOR * limit_s)
        except ProcessGone as gone:
            if not gone.was_slow:
                log.warning("grammar_worker.died", pid=process.pid, exit_code=gone.exit_code)
            return gone
        finally:
            await self._idle.put_back(process)

    async def _warm_up(self) -> None:
        try:
            await self._running_server()
        except (OSError, RuntimeError) as error:
            log.warning("grammar_worker.not_started", error=type(error).__name__)  # tried again when it is needed

    async def _running_server(self) -> ForkServer:
        """Return the process that forks, started if it is not running. Raises OSError."""
        async with self._starting:
            if self._server is None or not self._server.is_usable:
                if self._server is not None:
                    await run_in_thread(self._server.end)
                settings = json.dumps(attrs.asdict(self._settings)).encode()
                self._server = await run_in_thread(_start, self._tokenizer_json, settings)
            return self._server


class GrammarThreads:
    """Check grammars in threads, which nothing ends: for runtimes without processes."""

    def __init__(self, checker: GrammarChecker, max_bytes: int) -> None:
        self._checker = checker
        self._known = KnownGrammars(max_bytes)
        self._threads = trio.CapacityLimiter(MAX_PROCESSES)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()

    def known(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError | None:
        return self._known.find(spec, options)

    async def check(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError:
        result = await run_in_thread(self._checker.check, spec, limiter=self._threads, abandon_on_cancel=True)
        self._known.keep(spec, options, result)
        return result


def _start(tokenizer_json: bytes, settings: bytes) -> ForkServer:
    return ForkServer.start(MODULE, tokenizer_json, settings, niceness=NICENESS)


def make_grammar_pool(
    tokenizer_json: bytes, config: RuntimeConfig, *, check_apart: bool
) -> GrammarPool | GrammarThreads:
    """Return a server's pool. `check_apart`: check grammars in processes of their own instead of threads."""
    eos_token_ids, max_bytes = config.engine.eos_token_ids, config.max_grammar_bytes
    if check_apart:
        return GrammarPool(tokenizer_json, WorkerSettings(eos_token_ids, max_bytes, config.grammar_timeout_s))
    grammars = load_grammars(tokenizer_json, eos_token_ids)
    return GrammarThreads(GrammarChecker(grammars, max_bytes, config.grammar_timeout_s), max_bytes)
