"""What a step's report costs on its way to the web process: over the socket pair of one machine, over TCP, with TLS.

A job of `engine_core.py`. Both ends are in this process, so that the numbers are processor time of both: encode, send,
receive and decode a report, and the heartbeat with which the other end answers.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
import trio.testing
import trustme

from bench.engine_jobs import NUM_STEPS_TO_SETTLE, Numbers, quiet_collector
from quipu.actors.fleet.frames import FrameReader, FrameWriter
from quipu.actors.fleet.processes.link_tls import LinkTls, secure
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.supervisor import Heartbeat

HOST = "127.0.0.1"
INCARNATION = 1
KINDS = {"unix_us": "a socket pair", "tcp_us": "TCP", "tls_us": "TCP with TLS"}


@attrs.frozen
class Ends:
    engine: trio.SocketStream
    host: trio.SocketStream


def link(*, num_seqs: int, num_steps: int) -> Numbers:
    """Time one report of a step that decodes, and the answer to it, over each kind of link in turn."""
    with quiet_collector(), tempfile.TemporaryDirectory() as folder:
        return trio.run(_measure, decoding_report(num_seqs), num_steps, make_files(Path(folder)))


def decoding_report(num_seqs: int) -> StepReport:
    """Return what an engine reports of a step in which each sequence gets one token."""
    ids = list(range(1, num_seqs + 1))
    starts = [1000 + 7 * i for i in ids]
    none: list[int] = []
    return StepReport(
        1, 1, none, none, none, none, [], none, ids, starts, [start + 1 for start in starts], none, none, none, ids,
        [100 + 3 * i for i in ids], none, [], none, [], [], num_seqs, 0, 5000, 100, 0,
    )  # fmt: skip


def report_bytes(num_seqs: int) -> int:
    """Return the length of that report's frame."""
    return len(FrameWriter(trio.testing.MemorySendStream(), INCARNATION).encode(decoding_report(num_seqs)))


def make_files(folder: Path) -> LinkTls:
    """Return the files of this machine."""
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    files = LinkTls(*(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    issued.cert_chain_pems[0].write_to_path(files.cert)
    issued.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


async def _measure(report: StepReport, num_steps: int, files: LinkTls) -> Numbers:
    numbers: Numbers = {}
    for kind in KINDS:
        async with _open(kind, files) as ends:
            numbers[kind] = await _time(ends, report, num_steps)
    return numbers


async def _time(ends: Ends, report: StepReport, num_steps: int) -> float:
    times: list[int] = []

    async def answer() -> None:
        reader, writer = FrameReader(ends.host, INCARNATION), FrameWriter(ends.host, INCARNATION)
        for _ in range(num_steps + NUM_STEPS_TO_SETTLE):
            await reader.receive_all()
            await writer.send_all([Heartbeat(0, 0.0)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        reader, writer = FrameReader(ends.engine, INCARNATION), FrameWriter(ends.engine, INCARNATION)
        for _ in range(num_steps + NUM_STEPS_TO_SETTLE):
            began = time.perf_counter_ns()
            await writer.send_all([report])
            await reader.receive_all()
            times.append(time.perf_counter_ns() - began)
    return statistics.median(times[NUM_STEPS_TO_SETTLE:]) / 1000


@asynccontextmanager
async def _open(kind: str, files: LinkTls) -> AsyncIterator[Ends]:
    if kind == "unix_us":
        ends = Ends(*map(_stream_of, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)))
    else:
        (listener,) = await trio.open_tcp_listeners(0, host=HOST)
        engine = await trio.open_tcp_stream(*listener.socket.getsockname())
        ends = Ends(engine, await listener.accept())
        await listener.aclose()
    if kind == "tls_us":
        secured: dict[str, trio.SocketStream] = {}

        async def secure_host() -> None:
            secured["host"] = await secure(ends.host, files.host_context(), None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure_host)
            secured["engine"] = await secure(ends.engine, files.engine_context(), HOST)
        ends = Ends(**secured)
    yield ends
    for stream in (ends.engine, ends.host):
        await trio.aclose_forcefully(stream)


def _stream_of(connection: socket.socket) -> trio.SocketStream:
    connection.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))
