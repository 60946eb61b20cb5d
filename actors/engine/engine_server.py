"""What the engine process executes once it is bound to its parent (`processes/engine_process.py`).

`main` gets, as arguments: three file descriptors (the lifeline to its host, one end of a socket pair, the memory of its
step record, `shared/step_record.py`), the engine's incarnation, the interval of heartbeats, the address of its host
(`processes/reconnection.py`), and the configuration as JSON. It loads the engine and serves it over the socket. When
that connection is lost the engine drops every sequence, keeps its cache, and connects again. An engine of a host on
another machine gets no socket (-1) and connects before it loads (`processes/tcp_way.py`).

What must always hold: when the lifeline closes, this process ends; nothing of one incarnation is sent as another's; the
exit code tells the supervisor whether another start may succeed; every reason for which an
engine cannot start reaches the supervisor or, if that is gone, the log.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket

import attrs
import msgspec
import structlog
import trio

from ..config.engine_config import EngineConfig
from ..fleet.frames import FrameReader, FrameWriter, PeerGone
from ..fleet.processes.child import LOADING_ERRORS, is_shortage
from ..fleet.processes.greeting import send_greeting
from ..fleet.processes.heartbeat import TICK_S, HeartbeatMonitor
from ..fleet.processes.log_writer import LogLines, LogWriter, processors, relay_libraries, standard_error
from ..fleet.processes.reconnection import Admission, Way, WayBack
from ..fleet.processes.tcp_way import TcpWay
from ..kv_events.event_log import KvEventsError
from ..messages.accountant import StepReport
from ..messages.engine_adapters import AdapterLoaded
from ..messages.handler import LookedUp
from ..messages.supervisor import EngineReady, EngineRefused, Heartbeat
from ..shared.error_groups import first_leaf
from ..shared.error_text import error_text
from ..shared.step_record import StepRecord
from .engine import Engine, EngineNews
from .executor.loading import load_executor
from .open_tiers import TiersRefused
from .peers.listening_socket import NoPeerPort
from .peers.node_network import NodeNetwork
from .peers.peer_link import PeerNetwork
from .peers.unix_link import UnixNetwork

log = structlog.get_logger()


async def serve_process(stream: trio.SocketStream, incarnation: int, engine: Engine, beat_s: float) -> str:
    """Serve one incarnation over a connection until that is lost. Returns why it is."""
    reader, writer = FrameReader(stream, incarnation), FrameWriter(stream, incarnation)
    writing = trio.Lock()
    monitor = HeartbeatMonitor(0.0, beat_s)
    is_reading = False

    async def send(message: EngineReady | EngineNews | Heartbeat) -> None:
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
            await trio.sleep(beat_s)
            await send(engine.heartbeat())

    async def watch() -> None:
        last = trio.current_time()
        while True:
            await trio.sleep(TICK_S)
            now = trio.current_time()
            if (verdict := monitor.advance(now - last, could_receive=is_reading)) is not None:
                raise PeerGone(verdict.reason)
            last = now

    class Reports:
        async def send(self, report: EngineNews, /) -> None:
            await send(report)

    reason = ""
    try:
        async with trio.open_nursery() as nursery:
            await send(engine.ready(incarnation))
            nursery.start_soon(engine.run, Reports())
            nursery.start_soon(send_heartbeats)
            nursery.start_soon(watch)
            while True:
                is_reading = True
                messages = await reader.receive_all()
                is_reading = False
                monitor.on_message()
                for message in messages:
                    if isinstance(message, EngineReady | EngineRefused | StepReport | LookedUp | AdapterLoaded):
                        name = type(message).__name__
                        raise RuntimeError(f"the engine received {name}, which only the engine sends")
                    if not isinstance(message, Heartbeat):
                        await engine.receive(message)
    except* PeerGone as group:
        reason = str(first_leaf(group))
    return reason


async def serve_until_unwanted(admission: Admission, engine: Engine, way_back: Way, beat_s: float) -> None:
    """Serve one incarnation after the other, each on a connection of its own, for as long as the host wants any."""
    stream, incarnation = admission.stream, admission.incarnation
    while True:
        async with stream:
            reason = await serve_process(stream, incarnation, engine, beat_s)
        if not way_back.is_open():
            return
        log.warning("engine.connection_lost", incarnation=incarnation, reason=reason)
        await engine.rejoin()
        another = await way_back.connect()
        if another is None:
            return
        stream, incarnation = another.stream, another.incarnation


def main(argv: list[str]) -> int:
    """Run the engine process. The exit code tells the supervisor whether another start may succeed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline, descriptor, record_descriptor, incarnation, beat_s, address, config_json = argv
    way: Way
    if int(descriptor) >= 0:
        way, admission = WayBack(int(lifeline), address), _inherited(int(descriptor), int(incarnation))
    else:
        way = TcpWay.of_lifeline(int(lifeline), address)
    config = msgspec.json.decode(config_json.encode(), type=EngineConfig)
    log_writer = _configure_log(config.log_level)
    if isinstance(way, TcpWay):
        called = trio.run(way.connect)
        if called is None:
            log.error("engine.no_host", address=address)
            log_writer.drain()
            return os.EX_NOHOST
        admission = called
    network = _network_of(config, way, admission)
    if network is None:
        config = attrs.evolve(config, has_peers=False)
    try:
        executor = load_executor(config)
        executor.record = StepRecord(int(record_descriptor))
        executor.warm_up()
        engine = Engine(config, executor, network)
    except (TiersRefused, NoPeerPort) as error:
        return refuse(admission, error_text(error), log_writer)
    except (ValueError, *LOADING_ERRORS) as error:
        if is_shortage(error):
            log.error("engine.shortage", error=str(error) or type(error).__name__)
            with contextlib.suppress(
                OSError
            ):  # no descriptor for its loop either: the connection ends with the process
                trio.run(trio.aclose_forcefully, admission.stream)
            log_writer.drain()
            return os.EX_TEMPFAIL
        if isinstance(error, ImportError | RuntimeError):
            raise
        return refuse(admission, f"this checkpoint cannot be served: {error_text(error)}", log_writer)
    except KvEventsError as error:
        return refuse(admission, f"KV events: {error_text(error)}", log_writer)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)

    try:
        trio.run(serve_until_unwanted, admission, engine, way, float(beat_s))
    finally:
        engine.close()
        log_writer.drain()
    return 0


def _network_of(config: EngineConfig, way: Way, admission: Admission) -> PeerNetwork | None:
    """Return the way to other engines; None if it may not fetch from them."""
    if not config.has_peers:
        return None
    if not isinstance(way, TcpWay):
        return UnixNetwork()
    if not way.peer_secret:
        return None
    # where this machine is reached: by the address from which it reaches the web process
    host = admission.stream.socket.getsockname()[0]
    return NodeNetwork(host, way.peer_secret, way.tls, config.peer_ports)


def _inherited(descriptor: int, incarnation: int) -> Admission:
    """Return the connection that this process was started with."""
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):  # the web process is gone, which is noticed later
        send_greeting(connection)
    connection.setblocking(False)
    return Admission(trio.SocketStream(trio.socket.from_stdlib_socket(connection)), incarnation)


def refuse(admission: Admission, reason: str, log_writer: LogWriter) -> int:
    """Tell the supervisor, which logs it, why the engine cannot serve. Returns the exit code, EX_CONFIG."""

    async def send() -> None:
        async with admission.stream as stream:
            await FrameWriter(stream, admission.incarnation).send_all([EngineRefused(reason)])

    try:
        trio.run(send)
    except* PeerGone:
        log_writer.say(reason)  # the supervisor is gone and cannot log it
    log_writer.drain()
    return os.EX_CONFIG


def _configure_log(level: str) -> LogWriter:
    """Log on stderr in the web process's form."""
    number = logging.getLevelNamesMapping()[level.upper()]
    writer = LogWriter(standard_error())
    structlog.configure(
        processors=processors(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=LogLines(writer),
        cache_logger_on_first_use=True,
    )
    relay_libraries(number)
    logging.getLogger("quipu.kernels").setLevel(number)  # they do not use structlog, and say how they load
    return writer
