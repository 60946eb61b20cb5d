"""The engine: scheduler, KV-block manager and executor, one restart group.

`Engine` wires the three; `LoopHost` runs them in the web side's own loop (tests, simulation); `main` is what the engine
process executes (`processes/engine_process.py`), with one end of the socket pair as file descriptor FD and the config
as JSON. Only this module imports the executor, and with it torch.
"""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import orjson
import structlog
import trio

from .block_manager.actor import run_block_manager
from .block_manager.reservation import BlockManager
from .channel import Channel, FrameReader, FrameWriter, PeerGone, Sender
from .config import EngineConfig
from .executor.actor import run_executor
from .executor.executor import Executor
from .executor.loading import load_executor
from .kv_events.event_log import EventLog, KvEventsError
from .messages.accountant import StepReport
from .messages.block_manager import Reserve
from .messages.executor import StepPlan
from .messages.scheduler import Granted
from .messages.supervisor import Alive, EngineReady, EngineRefused
from .processes.log_writer import LogLines, LogWriter, Relay, standard_error
from .processes.pulse import ALIVE_INTERVAL_S
from .scheduler.actor import SchedulerMessage, run_scheduler
from .scheduler.config import SchedulerConfig
from .scheduler.planning import Batcher
from .scheduler.waiting import Policy
from .supervisor import Death, EngineLink

if TYPE_CHECKING:
    from .kv_events.publisher import EventPublisher

PLAN_SLOTS = 4
"""Plans, proposals, grants or reports that may wait between two of the three: more than are ever in flight."""


class Engine:
    """The three actors' state and channels; `inbox` is where submits and aborts go in."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Raises KvEventsError where these are configured and their sockets cannot be opened."""
        self.executor = executor
        pool = executor.backend.memory_plan
        self.events: EventPublisher | None = None
        events: EventLog | None = None
        if config.kv_events is not None:
            from .kv_events.publisher import EventPublisher  # loads ZeroMQ

            events = EventLog(config.block_size)
            self.events = EventPublisher(config.kv_events, events)
        self.inbox: Channel[SchedulerMessage] = Channel(config.max_num_seqs)
        self.block_manager = BlockManager(
            pool.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            share_pending_prefixes=config.share_pending_prefixes,
            step_overhead_tokens=config.step_overhead_tokens,
            watermark_blocks=math.ceil(config.watermark * pool.num_blocks),
            max_pinned_share=config.max_pinned_share,
            observers=[] if events is None else [events],
        )
        self.batcher = Batcher(
            SchedulerConfig(
                block_size=config.block_size,
                num_blocks=pool.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=pool.max_model_len,
                eos_token_ids=frozenset(config.eos_token_ids),
                enable_prefix_caching=config.enable_prefix_caching,
                max_steps_in_flight=config.max_steps_in_flight,
                policy=Policy(config.scheduling_policy),
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                max_waiting_requests=config.max_waiting_requests,
                max_waiting_tokens=config.max_waiting_tokens,
                max_waiting_share=config.max_waiting_share,
            )
        )

    async def run(self, reports: Sender[StepReport]) -> None:
        """Run the three actors until cancelled or one of them raises."""
        reserve: Channel[Reserve] = Channel(PLAN_SLOTS)
        granted: Channel[Granted] = Channel(PLAN_SLOTS)
        plans: Channel[StepPlan] = Channel(PLAN_SLOTS)
        async with trio.open_nursery() as nursery:
            flush_events = self.events.flush if self.events is not None else None
            nursery.start_soon(run_block_manager, self.block_manager, reserve, granted, flush_events)
            nursery.start_soon(run_scheduler, self.batcher, self.inbox, reserve, granted, plans, reports)
            nursery.start_soon(run_executor, self.executor, plans, self.inbox)

    def close_events(self) -> None:
        """Let go of the sockets of KV events, if there are any. Call it once the actors have ended."""
        if self.events is not None:
            self.events.close()

    def alive(self) -> Alive:
        """What it is doing, for whoever wonders whether it does anything."""
        running = self.executor.running_step
        return Alive(0, 0.0) if running is None else Alive(running.step, time.monotonic() - running.since)

    def ready(self, incarnation: int) -> EngineReady:
        """What it serves with."""
        capabilities, pool = self.executor.backend.capabilities, self.executor.backend.memory_plan
        return EngineReady(
            incarnation=incarnation,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            backend=capabilities.name,
            dtype=capabilities.dtype,
            max_model_len=pool.max_model_len,
            instruction_set=capabilities.instruction_set,
            determinism=capabilities.determinism,
            num_threads=capabilities.num_threads,
            weights_bytes=pool.weights_bytes,
            kv_cache_bytes=pool.num_blocks * pool.block_bytes,
            workspace_bytes=pool.workspace_bytes,
        )


class LoopHost:
    """Runs engines in the caller's loop, over in-memory channels."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Executor] = load_executor) -> None:
        self._config = config
        self._load = load
        self.engine: Engine | None = None
        """The one that runs now."""

    async def run(self, link: EngineLink) -> Death:
        engine = Engine(self._config, self._load(self._config))
        reports: Channel[StepReport] = Channel(PLAN_SLOTS)

        async def feed() -> None:
            while True:
                for message in await link.take():
                    await engine.inbox.send(message)

        async def tell() -> None:
            while True:
                await link.deliver(await reports.receive_all())

        self.engine = engine
        try:
            await link.deliver([engine.ready(link.incarnation)])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed)
                nursery.start_soon(tell)
                nursery.start_soon(engine.run, reports)
        except* Exception as group:
            await link.deliver(reports.take_nowait())
            return_value = Death(f"{type(_leaf(group)).__name__}: {_leaf(group)}")
        finally:
            self.engine = None
            engine.close_events()
            engine.executor.backend.close()
        return return_value


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def serve_process(stream: trio.SocketStream, incarnation: int, engine: Engine) -> None:
    """Serve one incarnation over a socket until the other end closes."""
    reader, writer = FrameReader(stream, incarnation), FrameWriter(stream, incarnation)

    writing = trio.Lock()

    async def say(message: StepReport | Alive) -> None:
        try:
            writing.acquire_nowait()  # nearly always: without a checkpoint a step
        except trio.WouldBlock:
            await writing.acquire()
        try:
            await writer.send_all([message])
        finally:
            writing.release()

    async def say_alive() -> None:
        while True:
            await trio.sleep(ALIVE_INTERVAL_S)
            await say(engine.alive())

    class Reports:
        async def send(self, report: StepReport, /) -> None:
            await say(report)

    async with trio.open_nursery() as nursery:
        await writer.send_all([engine.ready(incarnation)])
        nursery.start_soon(engine.run, Reports())
        nursery.start_soon(say_alive)
        try:
            while True:
                for message in await reader.receive_all():
                    if isinstance(message, EngineReady | EngineRefused | StepReport | Alive):
                        raise RuntimeError(f"a {type(message).__name__} came to the engine, which only sends them")
                    await engine.inbox.send(message)
        except PeerGone:
            nursery.cancel_scope.cancel()  # the web process is gone: free everything by ending


def main(argv: list[str]) -> int:
    """Run the engine process; its exit code tells the supervisor whether to try again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, incarnation, config_json = argv
    config = msgspec.json.decode(config_json.encode(), type=EngineConfig)
    log_writer = _configure_log(config.log_level)
    connection = socket.socket(fileno=int(descriptor))
    try:
        engine = Engine(config, load_executor(config))
    except (ValueError, OSError, MemoryError) as error:
        if is_shortage(error):
            structlog.get_logger().error("engine.shortage", error=str(error) or type(error).__name__)
            connection.close()
            log_writer.drain()
            return os.EX_TEMPFAIL
        return refuse(connection, int(incarnation), f"this checkpoint cannot be served: {error}", log_writer)
    except KvEventsError as error:
        return refuse(connection, int(incarnation), f"KV events: {error}", log_writer)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)

    async def run() -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        async with stream:
            await serve_process(stream, int(incarnation), engine)

    try:
        trio.run(run)
    except* PeerGone:
        pass
    finally:
        engine.close_events()
        log_writer.drain()
    return 0


def is_shortage(error: Exception) -> bool:
    """Whether an engine that could not be loaded lacks what may be there later: memory, or descriptors."""
    shortages = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in shortages)


def refuse(connection: socket.socket, incarnation: int, reason: str, log_writer: LogWriter) -> int:
    """Tell the supervisor why there will be no engine; gives the exit code (EX_CONFIG). It is the one who says it."""

    async def send() -> None:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(connection)) as stream:
            await FrameWriter(stream, incarnation).send_all([EngineRefused(reason)])

    try:
        trio.run(send)
    except* PeerGone:
        log_writer.say(reason)  # nobody else can say it any more
    log_writer.drain()
    return os.EX_CONFIG


def _configure_log(level: str) -> LogWriter:
    """One JSON object a line on stderr, as the web process writes where that is no terminal."""
    writer = LogWriter(standard_error())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(orjson.dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=LogLines(writer),
        cache_logger_on_first_use=True,
    )
    # the kernels know no structlog: what they say at load goes the same way
    kernels = logging.getLogger("quipu.kernels")
    kernels.setLevel(level.upper())
    kernels.addHandler(Relay())
    return writer
