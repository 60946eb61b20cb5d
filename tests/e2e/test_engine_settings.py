"""Engine settings and request options over HTTP: cache resets, salts, miss reasons, limits and deadlines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.servers import Server, eventually, serving

PROMPT = list(range(300, 350))


def details(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


def policy_of(server: Server) -> Any:
    return server.get("/server_info").json()["settings"]["scheduling_policy"]


def test_reset_and_salt(fake: Server) -> None:
    """A reset makes the next request miss; a salted prompt hits only the same salt; miss reasons are optional."""
    assert policy_of(fake) == "fcfs"
    prompt = [400, *PROMPT]
    assert details(fake.complete(prompt))["cached_tokens"] == 0
    assert details(fake.complete(prompt))["cached_tokens"] == 48
    assert fake.post("/reset_prefix_cache").status_code == 200
    cold = details(fake.complete(prompt, return_cached_tokens_details=True))
    assert (cold["cached_tokens"], cold["cache_misses"]) == (0, [{"reason": "diverged", "token": 0}])
    salted = details(fake.complete(prompt, cache_salt="mine", return_cached_tokens_details=True))
    assert salted["cached_tokens"] == 0
    assert salted["cache_misses"] == [{"reason": "diverged", "token": 0}], (
        "must not reveal that the tokens are cached for others"
    )
    assert details(fake.complete(prompt, cache_salt="mine"))["cached_tokens"] == 48
    other = details(fake.complete([*prompt[:20], 7, *prompt[21:]], return_cached_tokens_details=True))
    assert (other["cached_tokens"], other["cache_misses"]) == (16, [{"reason": "diverged", "token": 20}])


def test_no_prefix_caching(tmp_path: Path) -> None:
    """With `--no-enable-prefix-caching` usage reports 0 cached tokens, under any policy."""
    folder = tmp_path / "cold"
    flags = ["--executor", "fake", "--no-enable-prefix-caching", "--scheduling-policy", "fair"]
    with serving(folder, *flags) as server:
        assert policy_of(server) == "fair"
        for _ in range(2):
            found = details(server.complete(PROMPT, return_cached_tokens_details=True))
            assert (found["cached_tokens"], found["cache_write_tokens"]) == (0, 0)
            assert found["cache_misses"] == [{"reason": "disabled", "token": 0}]


def test_limits_and_deadline(tmp_path: Path) -> None:
    """One request runs until its deadline (504), one waits until its own, a third gets a 503 with Retry-After."""
    folder = tmp_path / "limits"
    flags = ["--executor", "fake", "--fake-step-seconds", "0.02", "--max-num-seqs", "1", "--max-waiting-requests", "1"]
    flags += ["--request-timeout", "4", "--scheduling-policy", "priority", "--allow-client-priority"]
    with serving(folder, *flags) as server, ThreadPoolExecutor(3) as pool:
        assert policy_of(server) == "priority"
        running = pool.submit(server.complete, PROMPT, 5000)
        eventually(lambda: server.metrics()["num_requests_running"] == 1, "one is running")
        waiting = pool.submit(server.complete, PROMPT, 5000, priority=-1)
        eventually(lambda: server.metrics()["num_requests_waiting"] == 1, "one is waiting")
        refused = server.complete(PROMPT, priority=-5)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        assert "waiting" in refused.json()["error"]["message"]
        for late in (running, waiting):
            answer = late.result()
            assert answer.status_code == 504
            assert answer.json()["error"]["type"] == "timeout_error"
        metrics = server.wait_at_rest()
        assert metrics['requests_total{outcome="rejected"}'] >= 1
        assert details(server.complete(PROMPT))["cached_tokens"] == 48
