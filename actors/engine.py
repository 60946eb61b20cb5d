"""The engine: scheduler, KV-block manager and executor, restarted as one group.

`Engine` connects the three. `LoopHost` runs them in the web side's own loop, for tests and simulation. `main` is what
the engine process executes (`processes/engine_process.py`), with one end of the socket pair as file descriptor FD and
the configuration as JSON. Only this module imports the executor, and torch with it.
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
from .executor.loading import load_executor
from .executor.step_runner import Executor
from .kv_events.event_log import EventLog, KvEventsError
from .messages.accountant import StepReport
from .messages.block_manager import Reserve
from .messages.executor import StepPlan
from .messages.scheduler import Granted
from .messages.supervisor import EngineReady, EngineRefused, Heartbeat
from .processes.heartbeat import HEARTBEAT_INTERVAL_S
from .processes.log_writer import LogLines, LogWriter, Relay, standard_error
from .scheduler.actor import SchedulerMessage, run_scheduler
from .scheduler.config import SchedulerConfig
from .scheduler.planning import Batcher
from .scheduler.waiting import Policy
from .supervisor import Death, EngineLink

if TYPE_CHECKING:
    from .kv_events.publisher import EventPublisher

PLAN_SLOTS = 4
"""Messages of one kind that may wait between two of the three actors: more than are ever in flight."""


class Engine:
    """The three actors' state and channels. Submits and aborts are put into `inbox`."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Raises KvEventsError if KV events are configured and their sockets cannot be opened."""
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
        """Close the sockets for KV events, if there are any. To be called once the actors have ended."""
        if self.events is not None:
            self.events.close()

    def heartbeat(self) -> Heartbeat:
        """Return which step is running, and for how long."""
        running = self.executor.running_step
        return Heartbeat(0, 0.0) if running is None else Heartbeat(running.step, time.monotonic() - running.since)

    def ready(self, incarnation: int) -> EngineReady:
        """Return what the engine serves with."""
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
        """The engine that is running."""

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
            error = _first_leaf(group)
            death = Death(f"{type(error).__name__}: {error}")
        finally:
            self.engine = None
            engine.close_events()
            engine.executor.backend.close()
        return death


def _first_leaf(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def serve_process(stream: trio.SocketStream, incarnation: int, engine: Engine) -> None:
    """Serve one incarnation over a socket until the other end closes."""
    reader, writer = FrameReader(stream, incarnation), FrameWriter(stream, incarnation)
    writing = trio.Lock()

    async def send(message: StepReport | Heartbeat) -> None:
        try:
            writing.acquire_nowait()  # nearly always succeeds, which saves each step a checkpoint
        except trio.WouldBlock:
            await writing.acquire()
        try:
            await writer.send_all([message])
        finally:
            writing.release()

    async def send_heartbeats() -> None:
        while True:
            await trio.sleep(HEARTBEAT_INTERVAL_S)
            await send(engine.heartbeat())

    class Reports:
        async def send(self, report: StepReport, /) -> None:
            await send(report)

    async with trio.open_nursery() as nursery:
        await writer.send_all([engine.ready(incarnation)])
        nursery.start_soon(engine.run, Reports())
        nursery.start_soon(send_heartbeats)
        try:
            while True:
                for message in await reader.receive_all():
                    if isinstance(message, EngineReady | EngineRefused | StepReport | Heartbeat):
                        raise RuntimeError(f"the engine received {type(message).__name__}, which only the engine sends")
                    await engine.inbox.send(message)
        except PeerGone:
            nursery.cancel_scope.cancel()  # the web process is gone: end, which frees everything


def main(argv: list[str]) -> int:
    """Run the engine process. The exit code tells the supervisor whether another start may succeed."""
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
    """Return whether an engine failed to load for lack of memory or file descriptors, which may be available later."""
    shortages = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in shortages)


def refuse(connection: socket.socket, incarnation: int, reason: str, log_writer: LogWriter) -> int:
    """Tell the supervisor, which logs it, why the engine cannot serve. Returns the exit code, EX_CONFIG."""

    async def send() -> None:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(connection)) as stream:
            await FrameWriter(stream, incarnation).send_all([EngineRefused(reason)])

    try:
        trio.run(send)
    except* PeerGone:
        log_writer.say(reason)  # the supervisor is gone and cannot log it
    log_writer.drain()
    return os.EX_CONFIG


def _configure_log(level: str) -> LogWriter:
    """Log one JSON object per line on stderr, as the web process does unless stderr is a terminal."""
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
    # the kernels do not use structlog: forward what they log while loading
    kernels = logging.getLogger("quipu.kernels")
    kernels.setLevel(level.upper())
    kernels.addHandler(Relay())
    return writer
