"""What the engine process executes once it is bound to its parent (`processes/engine_process.py`).

`main` gets one end of the socket pair as file descriptor FD, the memory of its step record (`shared/step_record.py`) as
RECORD, the engine's incarnation, and the configuration as JSON. It loads the engine and serves it over the socket until
the web process closes the other end.

What must always hold: the exit code tells the supervisor whether another start may succeed; every reason for which an
engine cannot start reaches the supervisor or, if that is gone, the log.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket

import msgspec
import orjson
import structlog
import trio

from .engine import Engine
from .engine_config import EngineConfig
from .executor.loading import load_executor
from .frames import FrameReader, FrameWriter, PeerGone
from .kv_events.event_log import KvEventsError
from .messages.accountant import StepReport
from .messages.supervisor import EngineReady, EngineRefused, Heartbeat
from .processes.greeting import send_greeting
from .processes.heartbeat import HEARTBEAT_INTERVAL_S
from .processes.log_writer import LogLines, LogWriter, Relay, standard_error
from .processes.shortage import LOADING_ERRORS, is_shortage
from .shared.step_record import StepRecord


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
                    await engine.receive(message)
        except PeerGone:
            nursery.cancel_scope.cancel()  # the web process is gone: end, which frees everything


def main(argv: list[str]) -> int:
    """Run the engine process. The exit code tells the supervisor whether another start may succeed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, record_descriptor, incarnation, config_json = argv
    connection = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(OSError):  # the web process is gone, which is noticed below
        send_greeting(connection)
    config = msgspec.json.decode(config_json.encode(), type=EngineConfig)
    log_writer = _configure_log(config.log_level)
    try:
        executor = load_executor(config)
        executor.record = StepRecord(int(record_descriptor))
        engine = Engine(config, executor)
    except (ValueError, *LOADING_ERRORS) as error:
        if is_shortage(error):
            structlog.get_logger().error("engine.shortage", error=str(error) or type(error).__name__)
            connection.close()
            log_writer.drain()
            return os.EX_TEMPFAIL
        if isinstance(error, ImportError | RuntimeError):
            raise
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
