"""The host tier with a real backend: threads copy while passes run, and what is loaded has the same bits."""

from __future__ import annotations

import attrs
import pytest
import trio

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine, EngineNews
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.actors.shared.block_keys import chain_keys
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.prompts import prompt_of
from tests.runtimes import eventually
from tests.tiny import BLOCK as SIZE
from tests.tiny import TINY

ROOT = bytes(32)
PROMPTS = [[*prompt_of(10 * SIZE, seed=seed), 7] for seed in range(5)]
"""Ten blocks each: four of them fill the device."""


@attrs.define
class Answer:
    tokens: list[int] = attrs.field(factory=list)
    reused: int = 0
    read: int = 0
    from_host: int = 0


async def serve(engine: Engine, reports: Channel[EngineNews], prompts: list[list[int]], first_id: int) -> list[Answer]:
    """Serve prompts concurrently and return what the reports say of each."""
    answers = {first_id + index: Answer() for index in range(len(prompts))}
    for sequence_id, prompt in zip(answers, prompts, strict=True):
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        await engine.receive(Submit(sequence_id, prompt, ROOT, chain_keys(ROOT, prompt, SIZE), sampling))
    num_open = len(answers)
    while num_open:
        for report in await reports.receive_all():
            assert isinstance(report, StepReport)
            for index, sequence_id in enumerate(report.admitted_ids):
                answer = answers[sequence_id]
                answer.reused, answer.read = report.admitted_reused[index], report.admitted_read[index]
                tiers = report.admitted_tiers[index] if report.admitted_tiers else None
                answer.from_host = (tiers or {}).get("host", 0)
            for sequence_id, token_id in zip(report.token_sequence_ids, report.token_ids, strict=True):
                answers[sequence_id].tokens.append(token_id)
            num_open -= len(report.terminal_ids)
    return list(answers.values())


async def wait_for_stores(engine: Engine) -> None:
    """Wait until no store is in progress: on a busy machine, blocks would be evicted before they are copied."""
    tiers = engine.block_manager.tiers
    if tiers is not None:
        await eventually(lambda: not tiers.stores.are_under_way, "the stores are over", within_s=60)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_same_tokens_from_the_host(kv_cache_dtype: str) -> None:
    """With a cache that holds four of five prompts, each answer is that of an engine whose cache holds all."""
    rounds: dict[int, list[Answer]] = {}
    for num_blocks, host_bytes in ((200, None), (45, 64 << 20)):
        config = EngineConfig(
            model_path=str(TINY),
            executor="cpu",
            block_size=SIZE,
            num_blocks=num_blocks,
            max_model_len=40 * SIZE,
            max_num_batched_tokens=256,
            kv_cache_dtype=kv_cache_dtype,
            kv_host_memory=host_bytes,
            kv_load="always",
            eos_token_ids=(),
        )
        engine = Engine(config, load_executor(config))
        reports: Channel[EngineNews] = Channel(8)
        answers: list[Answer] = []
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run, reports)
                for index in range(4):
                    beside = PROMPTS[index % 2 :: 2]
                    for prompts in ([beside[0]], beside[1:], PROMPTS[:2]):
                        answers += await serve(engine, reports, prompts, 1 + len(answers))
                        await wait_for_stores(engine)
                        check_manager(engine.block_manager)
                nursery.cancel_scope.cancel()
        engine.executor.close()
        rounds[num_blocks] = answers
    held, moved = rounds[200], rounds[45]
    assert [answer.tokens for answer in moved] == [answer.tokens for answer in held]
    assert all(answer.reused == answer.read for answer in moved)
    assert sum(answer.from_host for answer in moved) > 0 and not any(answer.from_host for answer in held)


def test_tier_leaves_the_cache_no_memory() -> None:
    """On the CPU, device cache and host tier share one memory, so the room for the cache is what the tier leaves."""
    config = EngineConfig(
        model_path=str(TINY), executor="cpu", block_size=SIZE, num_blocks=9, max_model_len=8 * SIZE, eos_token_ids=()
    )
    load_executor(config).close()
    with pytest.raises(ValueError, match=r"available, less --kv-host-memory 1048576\.00GiB: lower it"):
        load_executor(attrs.evolve(config, kv_host_memory=1 << 50))
