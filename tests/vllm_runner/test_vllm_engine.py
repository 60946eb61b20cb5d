"""A whole engine on vLLM's runner: counts of cached tokens, preemption, passes that raise, clients that leave.

The counts are those of any other backend, exactly; texts of the demo model are those of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.step_types import LogitRules
from tests.faults.deadly_engines import Deaths, Output, ask, every_fourth_pass_raising, open_deadly, settle
from tests.grammars import EOS, PERSON, UNION, accepts, check_person, check_union, schema
from tests.prompts import prompt_of
from tests.runtimes import Client, value_of
from tests.tiny import TINY
from tests.vllm_runner.test_vllm_backend import prompts
from tests.vllm_runner.vllm_backends import SIZE, vllm_marks

pytestmark = vllm_marks


@asynccontextmanager
async def open_vllm(deaths: Deaths | None = None, **changes: Any) -> AsyncIterator[Client]:
    """Open a runtime on the demo model, whose prompts are token ids."""
    model = {"model_path": str(DEMO), "vocab_size": 3072, "eos_token_ids": (), "enforce_eager": True}
    settings = {**model, "num_blocks": 200, **changes}
    async with open_deadly(deaths or Deaths(), executor="vllm", block_size=SIZE, **settings) as client:
        yield client


async def greedy(client: Client, prompt: list[int], **fields: Any) -> Output:
    output = await ask(client, prompt, **{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **fields})
    assert output.error is None and not output.record.disputed
    return output


async def beside(client: Client, prompts: list[list[int]], **fields: Any) -> list[Output]:
    """Ask for all of them at once."""
    found: dict[int, Output] = {}

    async def one(at: int) -> None:
        found[at] = await greedy(client, prompts[at], **fields)

    async with trio.open_nursery() as nursery:
        for at in range(len(prompts)):
            nursery.start_soon(one, at)
    return [found[at] for at in range(len(prompts))]


async def test_counts() -> None:
    """Cold, again, behind a shared prefix, and in chunks: text and counts."""
    first, second = prompts()[:2]
    whole = first[: len(first) // SIZE * SIZE]
    async with open_vllm() as client:
        cold = await greedy(client, first)
        again = await greedy(client, first)
        shared = await greedy(client, second)
        full = [await greedy(client, whole) for _ in range(2)]
        await settle(client)
        alone = await greedy(client, second, cache_salt="another")
        await settle(client)
    common = next(at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]) // SIZE * SIZE
    cached = len(first) // SIZE * SIZE
    assert [o.record.cached_tokens for o in (cold, again, shared)] == [0, cached, common]
    assert again.record.computed_tokens == len(first) - cached
    for output in full:  # the last block is copied, and its last token computed
        assert output.record.cached_tokens == len(whole) - SIZE
        assert output.record.restored_tokens == SIZE - 1 and output.record.computed_tokens == 1
    assert again.token_ids == cold.token_ids and full[0].token_ids == full[1].token_ids
    assert alone.record.cached_tokens == 0 and alone.token_ids == shared.token_ids
    async with open_vllm(max_num_batched_tokens=48) as client:
        chunked = await beside(client, prompts()[:2])
        await settle(client)
    assert [o.token_ids for o in chunked] == [cold.token_ids, shared.token_ids]
    positions = [(o.record.computed_tokens or 0) + (o.record.cached_tokens or 0) for o in chunked]
    assert positions == [len(first), len(second)]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_preempted(ranks: int) -> None:
    """A cache too small for all: some are preempted and computed again, and say what they say alone."""
    asked = [prompt[7 * at :] for at, prompt in enumerate(prompts())]  # no common prefix
    num_blocks = 2 + 2 * -(-len(asked[0]) // SIZE)  # with the null block: two prompts, and one block for both to grow
    async with open_vllm() as client:
        alone = [await greedy(client, prompt, max_tokens=40) for prompt in asked]
    async with open_vllm(num_blocks=num_blocks, max_model_len=400, tensor_parallel_size=ranks) as client:
        together = await beside(client, asked, max_tokens=40)
        await settle(client)
        assert value_of(client.runtime.metrics.num_preemptions) > 0
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert [o.record.completion_tokens for o in together] == [40] * 4
    # computed again as prompt, an output's logits have other bits: where two tokens are nearly equal, texts may part
    same = [next((at for at, (a, b) in enumerate(zip(x.token_ids[0], y.token_ids[0], strict=True)) if a != b), 40)
            for x, y in zip(alone, together, strict=True)]  # fmt: skip
    assert sum(at == 40 for at in same) >= 3 and min(same) >= 8, same


@pytest.mark.parametrize("when", ["before", "after"])
async def test_every_fourth_pass_raises(when: str) -> None:
    """Before or after the runner has run it: texts and counts are those of an undisturbed run."""
    fields = {"rules": LogitRules(repetition_penalty=1.1, min_tokens=4)}
    async with open_vllm() as client:
        undisturbed = await beside(client, prompts()[:3], **fields)
    async with open_vllm() as client:
        with every_fourth_pass_raising(client, when) as faults:
            disturbed = await beside(client, prompts()[:3], **fields)
        await settle(client)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert faults.num_raised >= 3
    assert [o.token_ids for o in disturbed] == [o.token_ids for o in undisturbed]
    assert all(o.record.recomputed_tokens == 0 and o.record.fault is None for o in disturbed)


async def test_engine_that_dies() -> None:
    """Requests go on with the next engine, and are counted once."""
    async with open_vllm() as client:
        undisturbed = await greedy(client, prompts()[0])
    async with open_vllm(Deaths([4])) as client:
        resumed = await greedy(client, prompts()[0])
        await settle(client)
    assert resumed.record.num_engine_deaths == 1 and not resumed.record.disputed
    assert resumed.usage == undisturbed.usage and resumed.token_ids == undisturbed.token_ids


async def test_client_that_leaves() -> None:
    """In the middle of its output, beside others: nothing is left of it, and the others' text is theirs."""
    async with open_vllm() as client:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def leave() -> None:
                    def cancel(delta: object) -> None:
                        scope.cancel()

                    await ask(client, prompts()[0], temperature=0.0, max_tokens=400, on_delta=cancel)

                nursery.start_soon(leave)
        assert scope.cancelled_caught
        await settle(client)
        after = await beside(client, prompts()[1:3])
        await settle(client)
        again = await beside(client, prompts()[1:3])
    assert [o.token_ids for o in after] == [o.token_ids for o in again]


async def test_grammars() -> None:
    """Outputs match their schema beside a free one, whatever the weights say; a seed means the same each time."""
    changes = {"model_path": str(TINY), "vocab_size": 4096, "eos_token_ids": (EOS,)}
    checks = [(schema(PERSON), check_person), (schema(UNION), check_union)]
    prompt, num_whole = prompt_of(40, seed=5), 0
    async with open_vllm(**changes) as client:
        for spec, check in checks:
            outputs = [
                await ask(client, prompt, grammar=spec, n=4, max_tokens=60, logprobs=2, ignore_eos=False)
                for _ in range(2)
            ]
            assert outputs[0].token_ids == outputs[1].token_ids
            for text, token_ids, reason in zip(outputs[0].texts, outputs[0].token_ids, outputs[0].reasons, strict=True):
                if reason is not None and reason.value == "stop":
                    check(text)
                    num_whole += 1
                else:
                    assert accepts(spec, list(token_ids))
        await settle(client)
    assert num_whole >= 2


@pytest.mark.parametrize("ranks", [1, 2])
async def test_host_tier(ranks: int) -> None:
    """Prompts come and go over a cache that holds two of four: what comes back from the host says the same."""
    asked = [prompt[7 * at :] for at, prompt in enumerate(prompts())]
    changes = {"num_blocks": 26, "max_model_len": 400, "max_num_seqs": 2, "tensor_parallel_size": ranks}
    async with open_vllm(kv_host_memory=64 << 20, **changes) as client:
        cold = [await greedy(client, prompt) for prompt in asked]
        await greedy(client, [5], max_tokens=1)  # whose report says what was stored before
        warm = [await greedy(client, prompt) for prompt in asked]
        await settle(client)
    assert [o.token_ids for o in warm] == [o.token_ids for o in cold]
    assert sum(o.record.cached_tokens for o in warm) > 0
    assert any((o.record.cached_by_tier or {}).get("host") for o in warm)
