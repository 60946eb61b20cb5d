"""Two engines with roles, each a process with a real model: clients get what one engine gives them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.engine_list import engine_samples, list_engines, wait_all_ready
from tests.e2e.ledger_command import ledger
from tests.e2e.prompts import text_prompt
from tests.e2e.servers import BLOCK, Server, eventually, serving
from tests.processes import PATIENCE_S

PROMPT = text_prompt("apart", 200)
OTHER = text_prompt("another", 90)
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"prompt": PROMPT},
    "choices": {"prompt": PROMPT, "n": 2, "temperature": 0.9, "seed": 3},
    "prompts": {"prompt": [PROMPT, OTHER, "A"]},
    "echo": {"prompt": OTHER, "echo": True, "logprobs": 1},
    "one token": {"prompt": OTHER, "max_tokens": 1},
}
FLAGS = ("--num-blocks", "400")
PAIR = ("--engines", "prefill:1,decode:1", "--prefill-local-tokens", "0", *FLAGS)


def ask(server: Server, name: str, salt: str) -> dict[str, Any]:
    """Send a completion that finds nothing cached; return its choices and usage."""
    answer = server.complete(**{"max_tokens": 40, "cache_salt": salt, **ASKED[name]})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return {"choices": body["choices"], "usage": body["usage"]}


def streamed(server: Server, salt: str) -> str:
    """Return the text of a streamed completion."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"cache_salt": salt}, timeout=PATIENCE_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield what a server with one engine answers."""
    with serving(tmp_path_factory.mktemp("alone"), *FLAGS) as server:
        yield {name: ask(server, name, name) for name in ASKED} | {"streamed": streamed(server, "streamed")}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with an engine of each role; in the end its ledger must agree with its counters."""
    folder = tmp_path_factory.mktemp("pair")
    with serving(folder, *PAIR) as server:
        wait_all_ready(server, 2)
        yield server
    (account,) = json.loads(ledger(folder, "reconcile", "--json").stdout)
    assert account["agrees"]


def test_as_by_one_engine(alone: dict[str, Any], pair: Server) -> None:
    """Texts, scores and counts are the same; prompts are computed by one engine and continued by the other."""
    assert [its["role"] for its in list_engines(pair)] == ["prefill", "decode"]
    assert {name: ask(pair, name, name) for name in ASKED} | {"streamed": streamed(pair, "streamed")} == alone
    metrics = pair.wait_at_rest()
    steps = {engine: its["engine_steps_total"] for engine, its in engine_samples(pair).items() if engine}
    assert steps["1"] > steps["0"] > 0
    assert metrics["usage_disputed_total"] == 0
    assert not any(value for name, value in metrics.items() if name.startswith("requests_resumed_total"))


def test_clients_that_leave(pair: Server) -> None:
    """Whenever a client leaves, both engines come to rest, and serve on."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    for index in range(8):
        try:
            timeout = httpx.Timeout(0.02 * (index + 1), connect=PATIENCE_S)
            with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=timeout) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if number == index:
                        break
        except httpx.TimeoutException:
            pass
    # an engine that fetches, and then runs no step, reports the blocks that it has released with its next step
    assert ask(pair, "plain", "afterwards")["usage"]["completion_tokens"] == 40
    assert pair.wait_at_rest()["usage_disputed_total"] == 0


def test_operators(alone: dict[str, Any], tmp_path: Path) -> None:
    """Roles are changed and engines added by role; one that is drained by moving ends, and its requests go on, like
    one that is moved alone."""
    with serving(tmp_path, *PAIR) as server, ThreadPoolExecutor(4) as pool:
        wait_all_ready(server, 2)
        assert server.post("/v1/admin/engines", {"role": "decode"}).json() == {"ids": [2]}
        wait_all_ready(server, 3)
        changed = httpx.patch(f"{server.url}/v1/admin/engines/1", json={"role": "mixed"}, timeout=PATIENCE_S)
        assert (changed.status_code, changed.json()["role"]) == (200, "mixed")
        asked = [
            pool.submit(server.complete, PROMPT, 300, cache_salt=f"moved {index}", temperature=0.9, seed=5)
            for index in range(4)
        ]
        eventually(lambda: sum(its["num_running"] for its in list_engines(server)[1:]) == 4, "they are decoded")
        busy = max(list_engines(server)[1:], key=lambda its: its["num_running"])["id"]
        moved = server.post(f"/v1/admin/engines/{busy}/move", {"count": 1, "to": 3 - busy})
        assert (moved.status_code, moved.json()) == (202, {"id": busy, "count": 1})
        drained = server.post("/v1/admin/engines/2/drain", {"mode": "move"})
        assert drained.status_code == 202, drained.text
        began = time.monotonic()
        eventually(lambda: [its["id"] for its in list_engines(server)] == [0, 1], "engine 2 is gone")
        assert time.monotonic() - began < 20, "no request was waited for, nor the time limit"
        answers = [each.result().json() for each in asked]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert ask(server, "plain", "plain") == alone["plain"]
        assert ask(server, "plain", "plain")["usage"]["prompt_tokens_details"]["cached_tokens"] % BLOCK == 0
        assert server.wait_at_rest()["usage_disputed_total"] == 0
