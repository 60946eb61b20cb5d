"""Passes of runner V2 that are launched before the last one is collected: the same tokens as one by one.

On the stand-ins of `v2_stand_ins.py` every pass is over when it is launched, but the host does not read its tokens, and
has to say the next one without knowing them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.backend import LaunchedPass
from quipu.kernels.step_types import LogitRules
from quipu.kernels.vllm_runner.device_sampler import DeviceDraws
from quipu.kernels.vllm_runner.runner_requests import RunnerRequests
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from tests.faults.deadly_engines import settle
from tests.kernels.step_batches import make_batch
from tests.runtimes import value_of
from tests.vllm_runner.test_vllm_backend import NUM_OUTPUTS, RANKS, prompts, tables, wanted
from tests.vllm_runner.test_vllm_engine import beside, greedy, open_vllm
from tests.vllm_runner.vllm_backends import close_all, open_backend, vllm_marks

pytestmark = vllm_marks


@pytest.fixture(scope="module", params=list(RANKS.values()), ids=list(RANKS))
def backend(request: pytest.FixtureRequest) -> VllmBackend:
    return open_backend(DEMO, tensor_parallel_size=request.param)


def decode(slot: int, at: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    """Return a row that feeds the output at this place, which the device alone needs to know."""
    position = len(prompts()[slot]) + at
    row = {"slot": slot, "position": position, "token_ids": [0], "carried": True, "blocks": blocks}
    return {**row, "output_position": at + 1, **more}


def start(slot: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"slot": slot, "position": 0, "token_ids": prompts()[slot], "blocks": blocks, **more}


def generate_ahead(backend: VllmBackend, blocks: list[list[int]], **draws: Any) -> list[list[int]]:
    """Return the outputs of prompts that decode together, each pass launched before the last one is collected."""
    slots = range(len(blocks))
    running: LaunchedPass = backend.launch(make_batch(*(start(s, blocks[s], **draws) for s in slots)))
    outputs: list[list[int]] = [[] for _ in slots]
    for at in range(NUM_OUTPUTS - 1):
        following = backend.launch(make_batch(*(decode(s, at, blocks[s], **draws) for s in slots)))
        for slot, token_id in enumerate(running.collect().token_ids):
            outputs[slot].append(token_id)
        running = following
    return [[*text, token_id] for text, token_id in zip(outputs, running.collect().token_ids, strict=True)]


def test_texts(backend: VllmBackend) -> None:
    """Greedy, they are the reference's; with seeds, they are those of passes one by one."""
    blocks = tables(3, seed=40)
    assert generate_ahead(backend, blocks) == wanted()[:3]
    draws = {"temperature": 1.5, "seed": 11, "top_p": 0.95}
    one_by_one = [list(backend.step(make_batch(*(start(s, blocks[s], **draws) for s in range(3)))).token_ids)]
    for at in range(NUM_OUTPUTS - 1):
        rows = [decode(s, at, blocks[s], **draws) for s in range(3)]
        one_by_one.append(list(backend.step(make_batch(*rows)).token_ids))
    assert generate_ahead(backend, blocks, **draws) == [list(text) for text in zip(*one_by_one, strict=True)]


def test_beside_chunks(backend: VllmBackend) -> None:
    """A prompt's chunks may be in passes that are launched ahead, and its first token is carried by the next one."""
    first, second = tables(2, seed=41)
    running = backend.launch(make_batch(start(0, first)))
    outputs: dict[int, list[int]] = {0: [], 1: []}
    prompt, size = prompts()[1], 96
    ends = [*range(size, len(prompt), size), len(prompt)]
    for at in range(NUM_OUTPUTS - 1):
        rows = [decode(0, at, first)]
        if at < len(ends):
            begin = ends[at] - size if at + 1 < len(ends) else ends[at - 1]
            chunk = {"slot": 1, "position": begin, "token_ids": prompt[begin : ends[at]], "blocks": second}
            rows.append({**chunk, "samples": ends[at] == len(prompt)})
        else:
            rows.append(decode(1, at - len(ends), second))
        following = backend.launch(make_batch(*rows))
        add(outputs, running.collect().token_ids)
        running = following
    add(outputs, running.collect().token_ids)
    assert outputs[0] == wanted()[0] and len(outputs[1]) == NUM_OUTPUTS - len(ends)
    assert outputs[1] == wanted()[1][: len(outputs[1])]


def add(outputs: dict[int, list[int]], token_ids: list[int]) -> None:
    for slot, token_id in enumerate(token_ids):
        outputs[slot].append(token_id)


def test_row_that_has_to_be_announced_waits(backend: VllmBackend) -> None:
    """A carried token whose row the runner cannot continue is read first; the running pass is collected as ever."""
    first, second = tables(2, seed=42)
    backend.step(make_batch(start(0, first)))
    backend.step(make_batch(start(0, second)))
    running = backend.launch(make_batch(decode(0, 0, second)))
    requests: RunnerRequests = vars(backend)["_requests"]
    assert not requests.needs_tokens(make_batch(decode(0, 1, second)))
    moved = make_batch(decode(0, 1, first))  # where the token before it was never computed
    assert requests.needs_tokens(moved)
    elsewhere = backend.launch(moved)
    assert running.collect().token_ids == wanted()[0][1:2]
    elsewhere.collect()
    back = backend.step(make_batch({**decode(0, 1, second), "token_ids": wanted()[0][1:2], "carried": False}))
    assert back.token_ids == wanted()[0][2:3]


def test_launch_that_raises_behind_a_running_pass(backend: VllmBackend) -> None:
    """The running pass is collected; the other one, repeated, draws what it would have drawn."""
    if vars(backend)["_followers"]:
        return  # then it ends the engine (`test_vllm_ranks.py`)
    (blocks,) = tables(1, seed=43)
    runner = vars(backend)["_runner"]
    outputs = list(backend.step(make_batch(start(0, blocks))).token_ids)
    for at in range(0, NUM_OUTPUTS - 2, 2):
        running = backend.launch(make_batch(decode(0, at, blocks)))
        fails = ("prepare_attn", "sample", "postprocess_sampled")[at // 2 % 3]
        with mock.patch.object(runner, fails, side_effect=MemoryError("a passing fault")):
            with pytest.raises(MemoryError, match="a passing fault"):
                backend.launch(make_batch(decode(0, at + 1, blocks)))
        outputs += running.collect().token_ids
        outputs += backend.step(make_batch(decode(0, at + 1, blocks))).token_ids
    assert outputs == wanted()[0][: len(outputs)]


async def test_engine() -> None:
    """Of a whole engine: nearly every decode is sent ahead, texts and counts are those of steps one by one, also beside
    a sequence whose rules need each token."""
    close_all()
    asked = [{}, {"temperature": 1.2, "seed": 5}, {"rules": LogitRules(repetition_penalty=1.1)}]
    found = []
    for ahead in (False, True):
        polls: dict[int, int] = {}
        num_unknown = 0
        begin = RunnerRequests.begin

        def is_over(draws: DeviceDraws, ahead: bool = ahead, polls: dict[int, int] = polls) -> bool:
            polls[id(draws)] = polls.get(id(draws), 0) + 1
            return not ahead or polls[id(draws)] > 400

        def counting(requests: RunnerRequests, batch: Any, begin: Any = begin) -> Any:
            nonlocal num_unknown
            step = begin(requests, batch)
            num_unknown += None in step.inputs
            return step

        with mock.patch.object(DeviceDraws, "is_over", is_over), mock.patch.object(RunnerRequests, "begin", counting):
            async with open_vllm() as client:
                await greedy(client, prompts()[0], max_tokens=1)  # whichever comes first then finds as much
                outputs = [await beside(client, prompts()[:2], max_tokens=10, **fields) for fields in asked]
                await settle(client)
                assert value_of(client.runtime.metrics.usage_disputed) == 0
        records = [[(o.record.cached_tokens, o.record.computed_tokens) for o in pair] for pair in outputs]
        found.append(([[o.token_ids for o in pair] for pair in outputs], records))
        assert (num_unknown > 10) == ahead, num_unknown
    assert found[0] == found[1]
