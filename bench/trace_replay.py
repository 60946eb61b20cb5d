"""Replay a trace of prompts through the real scheduler and block manager, in virtual time.

    python -m bench.trace_replay TRACE --capacity BLOCKS|inf [--block-tokens 512] [--sequential] [--json]
    python -m bench.trace_replay --quick [--json]

A trace is a file of JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. There is one id for each
`--block-tokens` tokens of the prompt, and it identifies the whole prefix up to the end of its block; the id of a
partial block is not used. Nothing is computed: a pass takes `--step-ms`, plus `--token-us` for each position, on a
virtual clock, and passes follow one another. `--sequential` submits each request when the previous one has ended.

An output token takes a place in a block that no prompt can match. `--outputs decoded` samples them one per step, as in
serving; `prefilled` treats them as known and computes them like prompt tokens. That gives the same blocks in far fewer
steps, so it is the default with `--sequential`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from bench.simulated import Job, PassCosts, SimulatedEngine, StepTime
from quipu.actors.engine.scheduler.config import SchedulerConfig

KEY_BYTES = 32
MAX_TOKEN_ID = 1 << 31


@attrs.frozen
class TracedRequest:
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: list[int]


@attrs.frozen
class Setting:
    """How a trace is replayed."""

    capacity: int | None
    """Blocks, without the null block; None: as many as the whole trace can fill."""
    block_tokens: int = 512
    sequential: bool = False
    decode_outputs: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_steps_in_flight: int = 2
    share_pending_prefixes: bool = True
    """Whether a new sequence waits for a block that another one is computing."""
    watermark: float = 0.01
    """Fraction of the blocks that an admission leaves free while others run."""
    costs: PassCosts = attrs.field(factory=PassCosts)


QUICK_TRACE = [
    TracedRequest(0.0, 1100, 4, [0, 1, 2]),
    TracedRequest(0.1, 1500, 4, [0, 1, 3]),
    TracedRequest(0.3, 1100, 4, [0, 1, 2]),
]


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Read the first `limit` requests, in file order. Raises ValueError if a line is not a request."""
    requests: list[TracedRequest] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) >= limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                request = TracedRequest(
                    row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"]), row["hash_ids"]
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            requests.append(request)
    return requests


def worst_case_blocks(requests: Iterable[TracedRequest], block_tokens: int) -> int:
    return sum(-(-(r.num_prompt_tokens + r.num_output_tokens) // block_tokens) for r in requests)


def make_engine(requests: list[TracedRequest], setting: Setting) -> SimulatedEngine:
    capacity = setting.capacity
    if capacity is None:
        capacity = max(1, worst_case_blocks(requests, setting.block_tokens))
    limits = SchedulerConfig(
        block_size=setting.block_tokens,
        num_blocks=capacity + 1,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_steps_in_flight=setting.max_steps_in_flight,
        max_model_len=max((r.num_prompt_tokens + r.num_output_tokens for r in requests), default=1),
    )
    return SimulatedEngine(
        limits,
        share_pending_prefixes=setting.share_pending_prefixes,
        watermark=setting.watermark,
        cache_outputs=False,
        explain_misses=False,  # a trace has no tokens to compare
    )


def make_job(index: int, request: TracedRequest, setting: Setting) -> Job:
    num_full = request.num_prompt_tokens // setting.block_tokens
    if len(request.hash_ids) < num_full:
        raise ValueError(f"request {index} has {len(request.hash_ids)} ids for {num_full} full blocks")
    token_ids: list[
        int
    ] = []  # a block's tokens are its id, so that blocks with different keys also differ in their tokens
    for hash_id in request.hash_ids:
        token_ids += [hash_id % MAX_TOKEN_ID] * setting.block_tokens
    del token_ids[request.num_prompt_tokens :]
    # the last output is never computed: its KV is not read
    num_known = 0 if setting.decode_outputs else request.num_output_tokens - 1
    token_ids += [0] * (request.num_prompt_tokens - len(token_ids) + num_known)
    return Job(
        id=index,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        keys=[i.to_bytes(KEY_BYTES, "little") for i in request.hash_ids[:num_full]],
        max_tokens=request.num_output_tokens - num_known,
    )


def replay_in_turn(engine: SimulatedEngine, requests: list[TracedRequest], setting: Setting) -> float:
    """Replay one request at a time; return the virtual seconds they took."""
    now = 0.0
    for index, request in enumerate(requests):
        engine.submit(make_job(index, request, setting))
        engine.pump()
        while engine.plans:
            now += setting.costs.seconds(engine.plans[0])
            engine.finish_step()
            engine.pump()
    return now


def replay_in_time(engine: SimulatedEngine, requests: list[TracedRequest], setting: Setting) -> float:
    """Replay each request at its timestamp; return the virtual second at which the last one ended."""
    arriving = deque(enumerate(requests))
    now = 0.0
    done_at: float | None = None  # end of the current pass
    while arriving or engine.plans:
        if done_at is None and engine.plans:
            done_at = now + setting.costs.seconds(engine.plans[0])
        if done_at is not None and (not arriving or done_at <= arriving[0][1].arrival_s):
            now, done_at = done_at, None
            engine.finish_step()
        else:
            now = max(now, arriving[0][1].arrival_s)
            while arriving and arriving[0][1].arrival_s <= now:
                index, request = arriving.popleft()
                engine.submit(make_job(index, request, setting))
        engine.pump()
    return now


def replay(requests: list[TracedRequest], setting: Setting) -> dict[str, Any]:
    """Replay the trace and return the results. Raises RuntimeError if a request is never served."""
    engine = make_engine(requests, setting)
    began = time.perf_counter()
    run = replay_in_turn if setting.sequential else replay_in_time
    virtual_seconds = run(engine, requests, setting)
    seconds = time.perf_counter() - began
    if engine.num_open:
        raise RuntimeError(f"{engine.num_open} requests were never served")
    admitted = [requests[index] for index in engine.reused]
    query_blocks = sum(r.num_prompt_tokens // setting.block_tokens for r in admitted)
    hit_tokens = sum(engine.reused.values())
    return {
        "requests": len(requests),
        "rejected": len(engine.rejected),
        "prompt_tokens": sum(r.num_prompt_tokens for r in admitted),
        "query_blocks": query_blocks,
        "hit_blocks": hit_tokens // setting.block_tokens,
        "hit_tokens": hit_tokens,
        "seconds": round(seconds, 4),
        "blocks_per_second": round(query_blocks / seconds, 1),
        "step_us_p50": step_us(engine.step_times, 0.5),
        "step_us_p99": step_us(engine.step_times, 0.99),
        "preemptions": engine.num_preemptions,
        "steps": len(engine.step_times),
        "scheduler_seconds": round(engine.scheduler_ns / 1e9, 4),
        "manager_seconds": round(engine.manager_ns / 1e9, 4),
        "virtual_seconds": round(virtual_seconds, 3),
        "most_running": engine.most_running,
        "capacity_blocks": engine.limits.num_blocks - 1,
    }


def step_us(step_times: list[StepTime], quantile: float) -> float | None:
    """Return a quantile of the time of a step in scheduler and block manager together; None without steps."""
    ordered = sorted(t.scheduler_ns + t.manager_ns for t in step_times)
    return round(ordered[int(quantile * (len(ordered) - 1))] / 1000, 2) if ordered else None


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def blocks(text: str) -> int | None:
    return None if text == "inf" else positive(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trace_replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, metavar="TRACE", nargs="?")
    parser.add_argument(
        "--capacity", type=blocks, default=argparse.SUPPRESS, metavar="BLOCKS|inf", help="without the null block"
    )
    parser.add_argument("--quick", action="store_true", help="smoke test: a made-up trace of three requests")
    parser.add_argument("--block-tokens", type=positive, default=512, help="tokens in a block (default: %(default)s)")
    parser.add_argument("--sequential", action="store_true", help="one request at a time, ignoring timestamps")
    parser.add_argument(
        "--outputs", choices=["decoded", "prefilled"], help="how output tokens are produced (see above)"
    )
    parser.add_argument("--limit", type=positive, help="replay only the first LIMIT requests")
    parser.add_argument("--max-num-seqs", type=positive, default=256, help="(default: %(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=positive, default=8192, help="(default: %(default)s)")
    parser.add_argument(
        "--share-pending-prefixes", action=argparse.BooleanOptionalAction, default=True, help="as served"
    )
    parser.add_argument(
        "--watermark", type=float, default=0.01, help="fraction of blocks kept free (default: %(default)s)"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="virtual time of a pass (default: %(default)s)")
    parser.add_argument("--token-us", type=float, default=20.0, help="virtual time per position (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    arguments = parser.parse_args()
    if not arguments.quick and (arguments.trace is None or "capacity" not in arguments):
        parser.error("a TRACE and its --capacity are required, or --quick")
    outputs = arguments.outputs or ("prefilled" if arguments.sequential else "decoded")
    setting = Setting(
        capacity=None if arguments.quick else arguments.capacity,
        block_tokens=arguments.block_tokens,
        sequential=arguments.sequential,
        decode_outputs=outputs == "decoded",
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        share_pending_prefixes=arguments.share_pending_prefixes,
        watermark=arguments.watermark,
        costs=PassCosts(arguments.step_ms / 1000, arguments.token_us / 1e6),
    )
    try:
        requests = QUICK_TRACE if arguments.quick else read_trace(arguments.trace, arguments.limit)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    gc.collect()
    gc.freeze()  # as the engine process does after start-up
    gc.set_threshold(50_000, 20, 1000)
    print(json.dumps(replay(requests, setting), indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
