"""Two hundred clients that disconnect at random moments: afterwards nothing of them is left in the server.

`make chaos` does the same with ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.e2e.prompts import expected_text, token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, num_files, serving, settled_num_files
from tests.e2e.vanishing import EventClock, draw_behaviours, read_steadily, vanish

NUM_CLIENTS = 200
MAX_NUM_SEQS = 16
"""Maximum sequences in a step: most clients have to queue."""
NUM_EVENTS = 400
"""Period over which the clients' arrivals are spread, in events of the steady client."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Few concurrent sequences, and prompts that take several steps."""
    flags = ["--executor", "fake", "--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "128"]
    with serving(tmp_path_factory.mktemp("vanishing"), *flags, "--num-blocks", "400", "--max-model-len", "6000") as s:
        yield s


def assert_serves(server: Server, tag: str) -> None:
    prompt = token_prompt(tag, 57)
    answer = server.complete(prompt, max_tokens=12)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(prompt, 12)


@pytest.mark.parametrize("seed", [1])
async def test_vanishing_clients(server: Server, seed: int) -> None:
    """Afterwards no account is open, no block held, no descriptor leaked in either process, and requests are served."""
    assert_serves(server, "before")
    before = server.wait_at_rest()
    pids = (server.pid, server.engine_pid())
    baseline = [settled_num_files(pid) for pid in pids]
    clock = EventClock()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as steady:
            steady.start_soon(read_steadily, server, clock)
            async with trio.open_nursery() as clients:
                for index, behaviour in enumerate(draw_behaviours(seed, NUM_CLIENTS, NUM_EVENTS)):
                    clients.start_soon(vanish, server, clock, index, behaviour)
            steady.cancel_scope.cancel()
    after = server.wait_at_rest()
    cancelled = after['requests_total{outcome="cancelled"}'] - before['requests_total{outcome="cancelled"}']
    assert cancelled > NUM_CLIENTS / 3, "many should have left midway"
    assert after['requests_total{outcome="failed"}'] == 0
    assert after["usage_disputed_total"] == 0
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after['kv_blocks{state="free"}'] + after['kv_blocks{state="cached"}'] == 399
    eventually(
        lambda: all(num_files(pid) <= num for pid, num in zip(pids, baseline, strict=True)),
        "both processes have as few open files as before",
    )
    assert (server.pid, server.engine_pid()) == pids, "a process was restarted"
    assert "crashed" not in server.log_text and "Traceback" not in server.log_text
    for index in range(5):  # blocks cached by vanished clients have correct contents
        assert_serves(server, f"vanishing {index}")
