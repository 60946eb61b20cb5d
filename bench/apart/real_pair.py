"""Two engines, each in a process and on a core of its own, one of which computes prompts that the other continues.

Used by `python -m bench.apart --real`. Dummy weights in the shape of Qwen3-0.6B, and the transfer as it is between the
engines of one machine; then, in the rows with `_tcp`, as it is between machines, over the loopback interface. Prompts
fill their last block, so that nothing is computed twice.

`moved_bytes`: a prompt is computed while nobody fetches it; then the other engine continues it, and does so again when
it has the blocks. Their bytes, over the time by which the first one takes longer to draw its token; beside a plain copy
of as many bytes by one thread, of memory that was touched before.

`second_token`: a prompt is fetched while it is computed, and continued when its first token is known. The time from
that token to the next one, in steps: of the engine that decodes, at that context, while nothing else runs. What a
transfer adds is that less 1.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

from bench.driven_engine import DrivenEngine, Served, running
from bench.shapes import QWEN3_06B as SHAPE
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.peers.peer_link import PeerNetwork
from quipu.actors.engine.peers.tcp_network import TcpNetwork
from quipu.actors.engine.peers.unix_link import UnixNetwork
from quipu.actors.fleet.processes.link_handshake import PEER_SECRET_BYTES
from quipu.actors.messages.peers import Peer

BLOCK_SIZE = 16
NUM_DECODED = 6
ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"moved_bytes": 0.5, "second_token": 2.0, "moved_bytes_tcp": 0.1, "second_token_tcp": 2.5}
"""The least share of a plain copy, and the most steps."""
CARRIERS = {"unix": "", "tcp": "_tcp"}
"""And what is appended to the names of their rows."""
HOST = "127.0.0.1"


def network_of(carrier: str, secret: bytes) -> PeerNetwork:
    """Return the way to the other process; `secret` is what both have for TCP."""
    return UnixNetwork() if carrier == "unix" else TcpNetwork(HOST, secret)


def config_of(folder: Path, num_tokens: int) -> EngineConfig:
    """Return the config of an engine that has room for two prompts of `num_tokens`, and their outputs."""
    num_blocks = 2 * (num_tokens // BLOCK_SIZE + 2) + 1
    return EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        executor="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=(num_blocks - 1) * BLOCK_SIZE,
        has_peers=True,
        eos_token_ids=(),
        watermark=0.0,
    )


@attrs.define
class PrefillSide:
    """The other process, and how to reach its engine."""

    process: trio.Process
    peer: Peer
    _received: bytearray = attrs.field(factory=bytearray)

    async def send(self, prompt: Sequence[int]) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(prompt).encode() + b"\n")

    async def read(self) -> dict[str, Any]:
        """Wait for a line. Raises RuntimeError if the process has ended."""
        return await read_line(self.process, self._received)


async def read_line(process: trio.Process, received: bytearray) -> dict[str, Any]:
    assert process.stdout is not None
    while b"\n" not in received:
        data = await process.stdout.receive_some()
        if not data:
            raise RuntimeError("the engine for prefill has ended")
        received += data
    line, _, rest = bytes(received).partition(b"\n")
    received[:] = rest
    found: dict[str, Any] = json.loads(line)
    return found


@asynccontextmanager
async def prefill_side(
    folder: Path, core: int, num_tokens: int, carrier: str, secret: bytes
) -> AsyncIterator[PrefillSide]:
    command = [sys.executable, "-m", "bench.apart.prefill_process", str(folder), str(core), str(num_tokens), carrier]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment
    )
    try:
        assert process.stdin is not None
        await process.stdin.send_all(secret.hex().encode() + b"\n")
        received = bytearray()
        with trio.fail_after(120):
            address = (await read_line(process, received))["address"]
        yield PrefillSide(process, Peer(1, address), received)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


class Prompts:
    """Prompts that no engine has seen."""

    def __init__(self, num_tokens: int) -> None:
        self._draw = random.Random(0)
        self._num_tokens = num_tokens

    def next(self) -> list[int]:
        return self._draw.choices(range(1000, SHAPE["vocab_size"]), k=self._num_tokens)


@attrs.frozen
class Continued:
    """One prompt that was computed there and continued here."""

    prompt: list[int]
    fields: dict[str, Any]
    """What it was submitted with."""
    first_at: float
    """When its first token came."""
    served: Served

    @property
    def second_s(self) -> float:
        """From the first token to the second one."""
        return self.served.submitted_at + self.served.token_s[0] - self.first_at

    @property
    def step_s(self) -> float:
        """Of the steps after the one that drew the second token."""
        times = self.served.token_s
        return statistics.median(later - earlier for earlier, later in pairwise(times))


async def continue_one(engine: DrivenEngine, other: PrefillSide, prompt: list[int], *, is_ahead: bool) -> Continued:
    """Have a prompt computed there and go on here. With `is_ahead`, its blocks are fetched meanwhile."""
    await other.send(prompt)
    if is_ahead:
        await engine.fetch(prompt, other.peer)
    first = await other.read()
    fields = {
        "max_tokens": NUM_DECODED,
        "output_token_ids": first["token_ids"],
        "is_resumed": True,
        "peer": other.peer,
    }
    (served,) = await engine.ask(prompt, **fields)
    if served.by_tier != {"device": 0, "peer": len(prompt)}:
        raise RuntimeError(f"found {served.by_tier} of {len(prompt)} tokens")
    return Continued(prompt, fields, first["first_at"], served)


class PlainCopy:
    """A copy by one thread between two places that were touched."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def seconds(self) -> float:
        started = time.perf_counter()
        self._target[:] = self._source
        return time.perf_counter() - started


async def measure(num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return both rows of each carrier."""
    return [row for carrier in CARRIERS for row in await measure_carrier(carrier, num_tokens, rounds)]


async def measure_carrier(carrier: str, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return both rows of one carrier."""
    secret, suffix = secrets.token_bytes(PEER_SECRET_BYTES), CARRIERS[carrier]
    cores = sorted(os.sched_getaffinity(0))
    moved, ahead, copies = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        os.sched_setaffinity(0, {cores[0]})
        try:
            async with (
                prefill_side(folder, cores[-1], num_tokens, carrier, secret) as other,
                running(config_of(folder, num_tokens), network_of(carrier, secret)) as engine,
            ):
                num_bytes = engine.engine.executor.backend.memory_plan.block_bytes * (num_tokens // BLOCK_SIZE)
                prompts, copy = Prompts(num_tokens), PlainCopy(num_bytes)
                for index in range(rounds + 1):
                    late = await continue_one(engine, other, prompts.next(), is_ahead=False)
                    early = await continue_one(engine, other, prompts.next(), is_ahead=True)
                    again = await engine.ask(late.prompt, **late.fields)
                    if index:  # not the first, in which memory is touched
                        moved.append(late.served.token_s[0] - again[0].token_s[0])
                        ahead.append(early)
                        copies.append(copy.seconds())
        finally:
            os.sched_setaffinity(0, cores)
    moved_s, memcpy_s = statistics.median(moved), statistics.median(copies)
    steps = [one.second_s / one.step_s for one in ahead]
    return [
        {
            "name": f"moved_bytes{suffix}",
            "value": memcpy_s / moved_s,
            "unit": "of a plain copy",
            "limit": LIMITS[f"moved_bytes{suffix}"],
            "tokens": num_tokens,
            "mib": num_bytes / 2**20,
            "moved_gb_per_s": num_bytes / moved_s / 1e9,
            "copied_gb_per_s": num_bytes / memcpy_s / 1e9,
        },
        {
            "name": f"second_token{suffix}",
            "value": statistics.median(steps),
            "unit": "steps after the first",
            "limit": LIMITS[f"second_token{suffix}"],
            "most": max(steps),
            "second_ms": statistics.median(one.second_s for one in ahead) * 1000,
            "step_ms": statistics.median(one.step_s for one in ahead) * 1000,
        },
    ]
