"""The same prompt gives the same text and logprobs cold, warm, with 30 others, after a preemption and after a restart.

Whole servers on the CPU kernels, over HTTP; logprobs are compared exactly.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, serving
from tests.kernel_markers import needs_kernels

pytestmark = needs_kernels

NUM_OTHERS = 30
LENGTHS = (70, 77, 84, 91, 98, 105, 96)
"""The last one is whole blocks: when repeated, its last block is copied."""
PROMPTS = [random.Random(index).choices(range(300, 4000), k=length) for index, length in enumerate(LENGTHS)]


def ask(server: Server, prompt: list[int], **fields: Any) -> tuple[dict[str, Any], int]:
    """Send a request; return its choice and its number of cached tokens."""
    answer = server.complete(prompt, 60, logprobs=5, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_with_others(server: Server, prompt: list[int]) -> tuple[dict[str, Any], int]:
    """Send a request while others are served, some of which share a prefix with it."""
    others = [
        prompt[: index % 4 * 16] + random.Random(index).choices(range(300, 4000), k=20) for index in range(NUM_OTHERS)
    ]
    with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
        answers = [pool.submit(server.complete, other, 40 + index) for index, other in enumerate(others[:15])]
        future = pool.submit(ask, server, prompt)
        answers += [pool.submit(server.complete, other, 40 + index) for index, other in enumerate(others[15:])]
        assert all(answer.result().status_code == 200 for answer in answers)
        return future.result()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_same_text_and_logprobs(tmp_path: Path, dtype: str) -> None:
    """The output is bit-identical, whatever else is in the batch and whatever was cached."""
    flags = ["--executor", "cpu", "--dtype", dtype]
    folders = [tmp_path / name for name in ("roomy", "tight")]
    with serving(folders[0], *flags, "--num-blocks", "1200") as server:
        engine = server.get("/server_info").json()["engine"]
        assert (engine["determinism"], engine["dtype"]) == ("strict", dtype)
        cold = [ask(server, prompt) for prompt in PROMPTS]
        warm = [ask(server, prompt) for prompt in PROMPTS]
        assert [cached for _, cached in cold] == [0] * len(PROMPTS)
        assert [cached for _, cached in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
        assert [choice for choice, _ in warm] == [choice for choice, _ in cold]
        crowded, cached = ask_with_others(server, PROMPTS[0])
        assert (crowded, cached > 0) == (cold[0][0], True)
        server.post("/reset_prefix_cache")
        assert ask_with_others(server, PROMPTS[5])[0] == cold[5][0]
        sampled = [ask(server, PROMPTS[1], temperature=1.0, seed=7)[0] for _ in range(2)]
        assert sampled[0] == sampled[1] != cold[1][0]

    # another server, with room for only two of them at a time
    with serving(folders[1], *flags, "--num-blocks", "25", "--no-enable-prefix-caching") as server:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            preempted = list(pool.map(lambda prompt: ask(server, prompt)[0], PROMPTS))
        assert server.metrics()["num_preemptions_total"] > 0, "the pool should be too small"
        assert preempted == [choice for choice, _ in cold]
        assert ask(server, PROMPTS[1], temperature=1.0, seed=7)[0] == sampled[0]
