"""Many clients of a whole runtime over real sockets, most of which disconnect: they leave nothing behind."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from quipu.kernels.fake import Dials
from tests.runtimes import Client, small_runtime
from tests.web.wires import PATIENCE_S, SURFACES, DirectWriters, Served, WritePath, both_write_paths, serving, writers

__all__ = ["writers"]

NUM_CLIENTS = 200
NUM_AT_ONCE = 40
LONG, SHORT = 300, 3
"""Tokens of a response whose client leaves, and of one that is read to its end."""


async def run_client(served: Served, rng: random.Random) -> bool:
    """Run one client and return whether it stayed to the end."""
    stays = rng.random() < 0.3
    path = rng.choice(list(SURFACES))
    peer = await served.connect(receive_bytes=rng.choice([None, 4096]))
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    await peer.ask(path, model="demo", **{limit: SHORT if stays else LONG})
    if stays:
        assert b"data: " in await peer.read_stream()
        await peer.stream.aclose()
        return True
    match rng.randrange(4):
        case 0:
            pass
        case 1:
            await peer.read_until(b"H")
        case 2:
            for _ in range(rng.randrange(12)):
                await peer.read_until(b"\n\n")
        case 3:
            await trio.sleep(rng.random() / 20)
    match rng.randrange(3):
        case 0:
            await peer.stream.aclose()
        case 1:
            peer.stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.stream.socket.close()
        case 2:
            with suppress(trio.BrokenResourceError):
                await peer.stream.send_eof()
            await peer.read_until(b"never")
            await peer.stream.aclose()
    return False


async def wait_at_rest(runtime: Client, num_tasks: int, num_files: int) -> None:
    with trio.fail_after(2 * PATIENCE_S):
        while (
            runtime.runtime.entry_store.num_open_accounts
            or runtime.runtime.desk.num_live_sequences
            or trio.lowlevel.current_statistics().tasks_living > num_tasks
            or num_open_files() > num_files
        ):
            await trio.sleep(0.01)


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@both_write_paths
@pytest.mark.parametrize("seed", [1])
async def test_disconnected_clients_leave_nothing(writers: DirectWriters, write_path: WritePath, seed: int) -> None:
    """No task, account, sequence, block or descriptor remains; each request ended once, as finished or cancelled."""
    rng = random.Random(seed)
    stayed: list[bool] = []
    async with small_runtime(Dials(step_seconds=0.001), max_num_seqs=32, num_blocks=1024) as runtime:
        async with serving(runtime.runtime.desk, write_path.options()) as served:
            num_tasks, num_files = trio.lowlevel.current_statistics().tasks_living, num_open_files()
            places = trio.Semaphore(NUM_AT_ONCE)

            async def run_limited(rng: random.Random) -> None:
                async with places:
                    stayed.append(await run_client(served, rng))

            async with trio.open_nursery() as nursery:
                for _ in range(NUM_CLIENTS):
                    nursery.start_soon(run_limited, random.Random(rng.random()))
            await wait_at_rest(runtime, num_tasks, num_files)
            runtime.assert_at_rest()
            outcomes = {
                outcome: int(
                    runtime.runtime.metrics.registry.get_sample_value(
                        "quipu:requests_total", {"model_name": "demo", "outcome": outcome}
                    )
                    or 0
                )
                for outcome in ("finished", "failed", "cancelled", "rejected")
            }
    assert outcomes["failed"] == outcomes["rejected"] == 0
    assert outcomes["finished"] >= sum(stayed) > NUM_CLIENTS / 5
    assert outcomes["cancelled"] > NUM_CLIENTS / 3
    assert sum(outcomes.values()) <= NUM_CLIENTS, "clients that left before their request was read have no account"
    assert (writers.num_sends > 100) == (write_path is WritePath.DIRECT)
