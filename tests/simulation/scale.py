"""What a token costs the web process with many engines, in virtual time: `python -m tests.simulation.scale`.

The actors, frames and hosts are those of the simulation (`engine_host.py`); the fake executor computes nothing. All
engines and the web process share one real thread, and the processor time of each task is added to what it belongs to:
so no machine with a hundred engines is needed. Prints a table as Markdown: docs/internals/scale.md explains it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import structlog
import trio

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.handler import Closed
from quipu.actors.messages.prompts import TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.wiring import Runtime
from quipu.kernels.fake import Dials, FakeBackend
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info
from tests.simulation.engine_host import SimulatedHost
from tests.simulation.virtual_time import Clocks, run_virtually
from tests.simulation.wire import Lane, Wire

STEP_S = 0.02
BLOCK = 16
SHARED, OWN = 64, 16
"""Tokens of a prompt that many have, and that only one has."""
ENGINE = {
    "run_scheduler",
    "run_block_manager",
    "run_executor",
    "run_adapters",
    "answer_look_ups",
    "run",
    "send_heartbeats",
    "watch",
}
WEB = ("tokenizer", "router", "accountant", "detokenizer", "frames read", "frames written", "clients", "other")


class Ledgers(trio.abc.Instrument):
    """Adds up the processor time of the tasks, by what they belong to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._names: dict[trio.lowlevel.Task, str] = {}
        self._began = process_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = process_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if (name := self._names.get(task)) is None:
            name = self._names[task] = _owner(task)
        self.seconds[name] += process_time() - self._began


def _owner(task: trio.lowlevel.Task) -> str:
    function = task.name.rpartition(".")[2]
    match function:
        case "keep_running":
            return str(task.coro.cr_frame.f_locals["deaths"].actor)
        case "_supervise":
            return "frames read"
        case "write":
            return "frames written"
        case "_ask":
            return "clients"
    return "engines" if function in ENGINE else "other"


async def _measure(num_engines: int, num_streams: int, num_tokens: int, clocks: Clocks) -> dict[str, Any]:
    rng = random.Random(1)
    config = runtime_config(
        block_size=BLOCK,
        max_model_len=SHARED + OWN + num_tokens,
        num_blocks=1 + 2 * -(-num_streams // num_engines) * -(-(OWN + SHARED + num_tokens) // BLOCK),
        max_num_seqs=2 * -(-num_streams // num_engines),
        max_num_batched_tokens=8192,
        num_engines=num_engines,
        max_open_requests=2 * num_streams,
        submit_slots=num_streams,
        encode_slots=num_streams,
        explain_requests=0,
    )
    dials = Dials(step_seconds=STEP_S, only_token_id=40)

    def load(engine: EngineConfig) -> Executor:
        executor = load_executor(engine)
        assert isinstance(executor.backend, FakeBackend)
        executor.backend.dials = dials
        return executor

    count = Counter[str]()
    post, put = Channel.post, Wire.put

    def counted_post(channel: Any, item: Any, /) -> None:
        count["messages between actors"] += 1
        post(channel, item)

    def counted_put(wire: Wire, lane: Lane, data: bytes) -> None:
        count["writes to sockets"] += 1
        count["bytes between web process and engines"] += len(data)
        put(wire, lane, data)

    shared = [[rng.randrange(100, 4000) for _ in range(SHARED)] for _ in range(max(1, num_streams // 20))]
    async with trio.open_nursery() as nursery:

        def make_host(_: int) -> SimulatedHost:
            return SimulatedHost(nursery, config.engine, load, None, 0.0)

        async with open_with_kept_vocabulary(
            config, serving_info(config), make_host, make_renderer=InlineRenderer
        ) as runtime:
            while not all(engine.is_ready for engine in runtime.desk.pool):
                await trio.sleep(STEP_S)
            with (
                mock.patch.multiple(Channel, post=counted_post),
                mock.patch.multiple(Wire, put=counted_put),
                mock.patch.multiple(time, perf_counter=perf_counter),  # slices of work are measured, as in a server
            ):
                ledgers = Ledgers()
                trio.lowlevel.add_instrument(ledgers)
                began, cpu_began = trio.current_time(), process_time()
                async with trio.open_nursery() as clients:
                    for number in range(num_streams):
                        prompt = (*rng.choice(shared), *(rng.randrange(100, 4000) for _ in range(OWN)))
                        clients.start_soon(_ask, runtime, number, prompt, num_tokens)
                cpu_s, virtual_s = process_time() - cpu_began, trio.current_time() - began
                trio.lowlevel.remove_instrument(ledgers)
        nursery.cancel_scope.cancel()
    return {
        "count": count,
        "seconds": ledgers.seconds,
        "cpu_s": cpu_s,
        "virtual_s": virtual_s,
        "num_tokens": num_streams * num_tokens,
    }


async def _ask(runtime: Runtime, number: int, prompt: Sequence[int], num_tokens: int) -> None:
    """Read one stream as a handler does that writes each token at once."""
    request = Encode(
        request_id=f"req-{number}",
        prompts=(TokenPrompt(tuple(prompt)),),
        num_choices=1,
        max_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        domain="tenant",
        prompt_param="prompt",
        max_tokens_param="max_tokens",
    )
    ticket = runtime.desk.open(request, "scale", Caller())
    over = trio.Event()
    try:
        await ticket.start()
        ticket.mailbox.attach(lambda events: over.set() if any(isinstance(e, Closed) for e in events) else None)
        await over.wait()
    finally:
        ticket.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1x100,10x1000,100x10000", help="engines x streams, several")
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)  # as a server does
    results: dict[str, dict[str, Any]] = {}
    for size in options.sizes.split(","):
        engines, streams = map(int, size.split("x"))
        results[f"{engines} engines, {streams} streams"] = run_virtually(
            1, partial(_measure, engines, streams, options.tokens)
        )
    print("| a token costs | " + " | ".join(results) + " |")
    print("|---|" + "---|" * len(results))
    for name in (*WEB, "engines"):
        cells = [f"{1e6 * r['seconds'][name] / r['num_tokens']:.1f} µs" for r in results.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    web = [1e6 * sum(r["seconds"][name] for name in WEB) / r["num_tokens"] for r in results.values()]
    print("| web process, all of it | " + " | ".join(f"{each:.1f} µs" for each in web) + " |")
    for name in ("messages between actors", "writes to sockets", "bytes between web process and engines"):
        print(f"| {name} | " + " | ".join(f"{r['count'][name] / r['num_tokens']:.2f}" for r in results.values()) + " |")
    print("| tokens a second at 100 % of a core | " + " | ".join(f"{1e6 / each:,.0f}" for each in web) + " |")


if __name__ == "__main__":
    main()
