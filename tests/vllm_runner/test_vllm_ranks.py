"""Several ranks (`--tensor-parallel-size`) as processes: what they open, what they leave behind, and how they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.step_errors import RankLost, is_context_lost
from quipu.kernels.vllm_runner.rank_executor import SHARED_MEMORY
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from tests.e2e.servers import Server, runs, serving
from tests.e2e.streams import streaming
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch
from tests.processes import eventually, has_ended
from tests.vllm_runner.test_vllm_backend import generate, prompts, tables, wanted
from tests.vllm_runner.vllm_backends import LONGEST_S, SERVE_DEMO, SIZE, close_all, open_backend, vllm_marks

pytestmark = vllm_marks

RANK = "quipu.kernels.vllm_runner.rank_process"
FLAGS = (*SERVE_DEMO, "--tensor-parallel-size", "2")
SIZES = ("--block-size", str(SIZE), "--num-blocks", "300", "--max-model-len", "4096")
LENGTH = 30
"""Tokens of an output."""
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def ranks_of(pid: int) -> list[int]:
    """Return the pids of the ranks that a process has started."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for found in children for child in found if runs(int(child), RANK)]


def listening_addresses(pid: int) -> set[str]:
    """Return the local addresses, without ports, of the TCP sockets on which a process listens."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(path.readlink()))
        except OSError:
            continue  # it was closed meanwhile
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets}


@pytest.fixture
def segments() -> Iterator[None]:
    """Check that no segment of shared memory with a name of ours is left."""
    before = {path.name for path in SHARED_MEMORY.glob("*quipu*")}
    yield
    assert {path.name for path in SHARED_MEMORY.glob("*quipu*")} <= before


def test_what_ranks_open(segments: None) -> None:
    """Sockets of ranks listen on loopback only, and no segment of shared memory has a name once they are loaded."""
    backend = open_backend(DEMO, tensor_parallel_size=2)
    (rank,) = ranks_of(os.getpid())
    assert not list(SHARED_MEMORY.glob("*quipu*"))
    for pid in (os.getpid(), rank):
        assert listening_addresses(pid) <= {"0100007F"}, pid
    assert backend.capabilities.library is not None and backend.capabilities.library.endswith("on 2 ranks")
    close_all()
    assert has_ended(rank)


def test_block_bytes() -> None:
    """The plan counts the parts of both ranks: a block takes as much as with one."""
    alone = open_backend(DEMO, num_blocks=None).memory_plan
    both = open_backend(DEMO, num_blocks=None, tensor_parallel_size=2).memory_plan
    assert both.block_bytes == alone.block_bytes
    assert both.num_blocks == alone.num_blocks and both.workspace_bytes is not None


def test_failure_in_a_pass(segments: None) -> None:
    """What one rank fails to compute leaves the other in the middle: no later pass is tried, and nothing is left."""
    backend = open_backend(DEMO, tensor_parallel_size=2)
    (rank,) = ranks_of(os.getpid())
    (blocks,) = tables(1, seed=5)
    assert generate(backend, prompts()[0], blocks)[0] == wanted()[0]
    runner = vars(backend)["_runner"]
    with mock.patch.object(runner, "_model_forward", side_effect=MemoryError("a fault")):
        with pytest.raises(RankLost, match="rank 0 of 2 failed in a pass: MemoryError: a fault") as raised:
            backend.step(make_batch({"slot": 0, "position": 0, "token_ids": prompts()[1], "blocks": blocks}))
    assert is_context_lost(raised.value)
    close_all()
    assert has_ended(rank)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
        ({"tensor_parallel_size": 2, "block_size": 16}, "add --block-size 32"),
        ({"tensor_parallel_size": 2, "num_blocks": 3}, "max_model_len"),
    ],
)
def test_refusals_leave_nothing(changes: dict[str, int], message: str, segments: None) -> None:
    """Before or after the ranks have met: what cannot be served is refused as with one rank, and none is left."""
    close_all()
    with pytest.raises(ValueError, match=message):
        VllmBackend(backend_config(DEMO, **{"block_size": SIZE, "num_blocks": 160, "enforce_eager": True, **changes}))
    assert ranks_of(os.getpid()) == []


def rank_of(server: Server) -> int:
    """Wait for the engine's other rank and return its pid."""
    (rank,) = eventually(lambda: ranks_of(server.engine_pid()), "the engine has another rank")
    return rank


def wait_for_the_end_of(*pids: int) -> None:
    eventually(lambda: all(map(has_ended, pids)), "the engine and its rank end")


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    """Return the answer to a greedy completion, however long it takes."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_deaths(tmp_path: Path, segments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed ends its engine at once, and an engine its ranks; requests go on with the next.

    Those that were running, and those that arrive meanwhile, whose counts are those of undisturbed ones.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # which the ranks divide
    asked = [prompts()[0], prompts()[3]]
    with serving(tmp_path, *FLAGS, *SIZES, ready_s=LONGEST_S) as server, ThreadPoolExecutor(2) as pool:
        undisturbed = [ask(server, prompt) for prompt in asked]
        for index, victim in enumerate(("rank", "engine")):
            engine, rank = server.engine_pid(), rank_of(server)
            with streaming(server, prompts()[1], 3000) as stream:
                running = [pool.submit(ask, server, prompt) for prompt in asked]
                stream.read_some()
                os.kill(rank if victim == "rank" else engine, signal.SIGKILL)
                wait_for_the_end_of(engine, rank)
                for was, future in zip(undisturbed, running, strict=True):
                    usage = future.result()["usage"]
                    assert usage["completion_tokens"] == LENGTH
                    assert usage["prompt_tokens"] == was["usage"]["prompt_tokens"]
                told = stream.text
                while stream.text == told:
                    stream.read_some()
                assert stream.error is None
            assert server.get("/health").json()["incarnation"] == index + 2
        metrics = server.wait_at_rest()
        assert metrics["usage_disputed_total"] == 0
        assert ask(server, asked[0])["choices"][0]["text"] == undisturbed[0]["choices"][0]["text"]
        engine, rank = server.engine_pid(), rank_of(server)
    assert has_ended(engine) and has_ended(rank)
    assert "rank 1 of 2 has ended: killed by signal 9" in server.log_text
