"""The jobs that `engine_core` times on quipu's side. `peers/vllm_engine.py` has jobs of the same names for the peer.

A job takes numbers and returns numbers, times in microseconds, and creates its own engine. Only calls of quipu are
timed: requests, prompts and results of steps are made outside the timers.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from bench.simulated import Job, SimulatedEngine
from bench.trace_replay import Setting, read_trace, replay
from quipu.actors.channel import Channel
from quipu.actors.engine.block_manager.actor import run_block_manager
from quipu.actors.engine.scheduler.actor import SchedulerMessage, run_scheduler
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import Granted
from quipu.actors.shared.block_keys import chain_keys

VOCABULARY = 128_000
MAX_LEN = 131_072
NUM_BATCHED_TOKENS = 8192
NUM_STEPS_TO_SETTLE = 20
WHOLE_PROMPT = 1 << 30
ROOT = bytes(32)

Numbers = dict[str, float]
rng = random.Random(1)


def draw_tokens(count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Set up the garbage collector as in the engine process: objects that exist at the start are frozen."""
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def decoding_engine(*, num_seqs: int, num_blocks: int, block_size: int) -> SimulatedEngine:
    """Return an engine with `num_seqs` decoding sequences; one in `block_size` of them opens a block in each step."""
    engine = SimulatedEngine(
        SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks + 1,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=NUM_BATCHED_TOKENS,
            max_model_len=MAX_LEN,
        ),
        draw=draw_tokens,
    )
    for index in range(num_seqs):
        token_ids = draw_tokens(block_size + index % block_size)
        keys = chain_keys(ROOT, token_ids, block_size)
        # as long as the context and the pool allow, so that none ends while steps are timed
        max_tokens = min(MAX_LEN, num_blocks * block_size) - len(token_ids)
        engine.submit(Job(index, token_ids, len(token_ids), keys, max_tokens, ROOT))
    engine.pump()
    while engine.most_running < num_seqs:
        engine.finish_step()
        engine.pump()
    for _ in range(NUM_STEPS_TO_SETTLE):
        engine.finish_step()
        engine.pump()
    return engine


def step(*, num_seqs: int, num_blocks: int, block_size: int, num_steps: int) -> Numbers:
    """Time handling a step's result and planning the next: `on_done`, `next_action`, `grant` and `accept` if needed."""
    engine = decoding_engine(num_seqs=num_seqs, num_blocks=num_blocks, block_size=block_size)
    with quiet_collector():
        engine.step_times.clear()
        for _ in range(num_steps):
            engine.finish_step()
            engine.pump()
    times = engine.step_times
    if len(times) != num_steps or engine.num_preemptions or len(engine.plans[-1].row_ids) != num_seqs:
        raise RuntimeError("a step did something other than decode")
    return {
        "step_us": statistics.median(t.scheduler_ns + t.manager_ns for t in times) / 1000,
        "manager_us": statistics.median(t.manager_ns for t in times) / 1000,
    }


def prompt(*, num_tokens: int, num_blocks: int, block_size: int, repeats: int) -> Numbers:
    """Time a long prompt in the block manager, per full block: not cached, fully cached, fully cached and in use."""
    token_ids = draw_tokens(num_tokens + 1)  # at least one token is computed
    num_full = num_tokens // block_size
    times: dict[str, list[int]] = {name: [] for name in ("hash", "cold", "idle", "held", "release")}
    engine = SimulatedEngine(
        SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks + 1,
            max_num_seqs=2,
            max_num_batched_tokens=2 * len(token_ids),
            max_model_len=MAX_LEN,
            max_steps_in_flight=1,
        ),
        draw=draw_tokens,
    )
    ids = iter(range(1_000_000))

    def submit(tokens: list[int], keys: list[bytes], max_tokens: int = 1) -> None:
        engine.submit(Job(next(ids), tokens, len(tokens), keys, max_tokens, ROOT))

    def in_manager(act: Callable[[], object]) -> int:
        """Return the nanoseconds in the block manager during `act` and its consequences."""
        before = engine.manager_ns
        act()
        engine.pump()
        return engine.manager_ns - before

    def fill(tokens: list[int], keys: list[bytes]) -> tuple[int, int]:
        took = in_manager(lambda: submit(tokens, keys))
        return took, in_manager(engine.finish_step)

    keys = chain_keys(ROOT, token_ids, block_size)
    fill(token_ids, keys)
    with quiet_collector():
        for _ in range(repeats):
            others = draw_tokens(num_tokens + 1)
            began = time.perf_counter_ns()
            other_keys = chain_keys(ROOT, others, block_size)
            times["hash"].append(time.perf_counter_ns() - began)
            times["cold"].append(sum(fill(others, other_keys)))
            took, released = fill(token_ids, keys)
            times["idle"].append(took)
            times["release"].append(released)
        submit(token_ids, keys, max_tokens=1000)
        engine.pump()
        for _ in range(repeats):
            submit(token_ids, keys)
            times["held"].append(in_manager(engine.finish_step))
            engine.finish_step()
            engine.pump()
    if any(reused not in (0, num_full * block_size) for reused in engine.reused.values()):
        raise RuntimeError("a prompt was found partially")
    if sum(reused > 0 for reused in engine.reused.values()) != 2 * repeats + 1:
        raise RuntimeError("a cached prompt was not found")
    return {f"{name}_us": statistics.median(ns) / 1000 / num_full for name, ns in times.items()}


def trace(*, path: str, num_blocks: int, block_size: int) -> Numbers:
    """Replay a trace one request at a time; return the time in the block manager per request."""
    # a prompt is one chunk and nothing is planned ahead, which is how the peer allocates it
    setting = Setting(
        num_blocks,
        block_size,
        sequential=True,
        decode_outputs=False,
        max_num_batched_tokens=WHOLE_PROMPT,
        max_steps_in_flight=1,
    )
    requests = read_trace(Path(path))
    with quiet_collector():
        found = replay(requests, setting)
    return {
        "request_us": found["manager_seconds"] * 1e6 / found["requests"],
        "manager_seconds": found["manager_seconds"],
        "hit_blocks": found["hit_blocks"],
    }


# ---------------------------------------------------------------- quipu alone: the actors, over channels


def actors(*, num_seqs: int, num_blocks: int, block_size: int, num_steps: int) -> Numbers:
    """Time the same step as `step` in the actors' loop: scheduler and block manager over channels.

    The time is from the executor's reply to its next plan; the previous step's report is written meanwhile.
    """
    engine = decoding_engine(num_seqs=num_seqs, num_blocks=num_blocks, block_size=block_size)
    with quiet_collector():
        return {"step_us": trio.run(_run_actors, engine, num_steps)}


async def _run_actors(engine: SimulatedEngine, num_steps: int) -> float:
    inbox: Channel[SchedulerMessage] = Channel(4)
    reserve: Channel[Reserve] = Channel(4)
    granted: Channel[Granted] = Channel(4)
    plans: Channel[StepPlan] = Channel(4)
    reports: Channel[StepReport] = Channel(4)
    times: list[int] = []

    async def execute() -> None:
        held = engine.plans  # replies to a plan only when it has the next, like a device that is never idle
        for _ in range(num_steps + NUM_STEPS_TO_SETTLE):
            done = engine.answer(held.popleft())
            began = time.perf_counter_ns()
            inbox.post(done)
            held += await plans.receive_all()
            times.append(time.perf_counter_ns() - began)

    async def read_reports() -> None:
        while True:
            await reports.receive_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_block_manager, engine.manager, reserve, granted)
        nursery.start_soon(run_scheduler, engine.batcher, inbox, reserve, granted, plans, reports)
        nursery.start_soon(read_reports)
        await execute()
        nursery.cancel_scope.cancel()
    return statistics.median(times[NUM_STEPS_TO_SETTLE:]) / 1000
