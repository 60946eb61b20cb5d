"""Time vLLM's scheduler and KV-cache manager: the peer's side of `python -m bench.engine_core`.

That command runs it with the interpreter of `make peers`; it imports nothing of quipu. It reads jobs from standard
input, one JSON object per line, and answers each with one on standard output: `{"job": name, **arguments}` with the
jobs and arguments of `bench/engine_jobs.py`, times in microseconds. No module of vLLM is replaced; its defaults apply
to everything that the arguments do not set.

As on quipu's side, making requests, prompts and results of steps is not timed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VOCABULARY = 128_000
MAX_LEN = 131_072
NUM_BATCHED_TOKENS = 8192
NUM_STEPS_TO_SETTLE = 20
KEY_BYTES = 32
HASH = "sha256"  # vLLM's default
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LEN,
}
"""A model config without weights, for vLLM to read."""

Numbers = dict[str, float]
clock = time.perf_counter_ns
rng = random.Random(1)
unending = SamplingParams(max_tokens=MAX_LEN, ignore_eos=True)


def draw_tokens(count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Freeze the garbage collector's objects, as vLLM's EngineCore does after start-up."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def kv_config(num_blocks: int, block_size: int) -> KVCacheConfig:
    """Return the cache config for `num_blocks`, not counting the null block."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def make_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    return KVCacheManager(
        kv_config(num_blocks, block_size),
        max_model_len=1 << 20,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )


def make_scheduler(num_seqs: int, num_blocks: int, block_size: int) -> Scheduler:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_LEN),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True, prefix_caching_hash_algo=HASH),
            scheduler_config=SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=NUM_BATCHED_TOKENS,
                max_model_len=MAX_LEN,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
        )
    config.cache_config.num_gpu_blocks = num_blocks + 1
    return Scheduler(
        config,
        kv_config(num_blocks, block_size),
        StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,  # as a server does
    )


def make_hasher(block_size: int) -> Callable[[Request], list[bytes]]:
    hasher: Callable[[Request], list[bytes]] = get_request_block_hasher(block_size, get_hash_fn_by_name(HASH))
    return hasher


# ---------------------------------------------------------------- the jobs


def step(*, num_seqs: int, num_blocks: int, block_size: int, num_steps: int) -> Numbers:
    """Time `Scheduler.schedule` and `Scheduler.update_from_output`, alternately."""
    scheduler = make_scheduler(num_seqs, num_blocks, block_size)
    hasher = make_hasher(block_size)
    for index in range(num_seqs):
        token_ids = draw_tokens(block_size + index % block_size)
        scheduler.add_request(Request(str(index), token_ids, unending, None, block_hasher=hasher))

    def one_step() -> tuple[int, int]:
        """Return the nanoseconds and the number of scheduled sequences."""
        a = clock()
        output = scheduler.schedule()
        b = clock()
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [] if scheduler.requests[i].is_prefill_chunk else [token_id]
            for i, token_id in zip(ids, draw_tokens(len(ids)), strict=True)
        ]
        result = ModelRunnerOutput(ids, {i: row for row, i in enumerate(ids)}, sampled)
        c = clock()
        scheduler.update_from_output(output, result)
        return clock() - c + b - a, output.total_num_scheduled_tokens

    while len(scheduler.running) < num_seqs:
        one_step()
    for _ in range(NUM_STEPS_TO_SETTLE):
        one_step()
    with quiet_collector():
        times = [one_step() for _ in range(num_steps)]
    if any(num_scheduled != num_seqs for _, num_scheduled in times):
        raise RuntimeError("a step did something other than decode")
    return {"step_us": statistics.median(ns for ns, _ in times) / 1000}


def prompt(*, num_tokens: int, num_blocks: int, block_size: int, repeats: int) -> Numbers:
    """Time `get_computed_blocks` with `allocate_slots`, and `free`, for a long prompt; per full block."""
    manager, hasher = make_manager(num_blocks, block_size), make_hasher(block_size)
    token_ids = draw_tokens(num_tokens + 1)
    num_full = num_tokens // block_size
    times: dict[str, list[int]] = {name: [] for name in ("hash", "cold", "idle", "held", "release")}
    ids = iter(range(1_000_000))

    def take(name: str, tokens: list[int], num_expected: int) -> Request:
        request = Request(str(next(ids)), tokens, unending, None)
        request._block_hasher = hasher  # noqa: SLF001 (how vLLM's scheduler gets its hashes)
        a = clock()
        request.update_block_hashes()
        b = clock()
        blocks, num_found, _ = manager.get_computed_blocks(request)
        given = manager.allocate_slots(
            request,
            len(tokens) - num_found,
            num_found,
            blocks,
            full_sequence_must_fit=True,
            has_scheduled_reqs=False,
        )
        times[name].append(clock() - b)
        times["hash"].append(b - a)
        if given is None or num_found != num_expected:
            raise RuntimeError(f"{num_found} tokens of a prompt were found")
        return request

    def release(request: Request) -> int:
        began = clock()
        manager.free(request)
        return clock() - began

    release(take("cold", token_ids, 0))
    times["cold"].clear()
    with quiet_collector():
        for _ in range(repeats):
            released = release(take("cold", draw_tokens(num_tokens + 1), 0))
            times["cold"][-1] += released
            times["release"].append(release(take("idle", token_ids, num_full * block_size)))
        take("idle", token_ids, num_full * block_size)
        times["idle"].pop()
        for _ in range(repeats):
            release(take("held", token_ids, num_full * block_size))
    return {f"{name}_us": statistics.median(ns) / 1000 / num_full for name, ns in times.items()}


def trace(*, path: str, num_blocks: int, block_size: int) -> Numbers:
    """Replay a trace one request at a time; return the time in the KV-cache manager per request."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    manager = make_manager(num_blocks, block_size)
    spent = num_hits = 0
    with quiet_collector():
        for number, row in enumerate(rows):
            length, num_outputs = row["input_length"], row["output_length"]
            hashes = [i.to_bytes(KEY_BYTES, "little") for i in row["hash_ids"][: length // block_size]]
            request = Request(str(number), [0] * length, unending, None)
            request.block_hashes = hashes
            a = clock()
            blocks, num_found, _ = manager.get_computed_blocks(request)
            given = manager.allocate_slots(
                request,
                length - num_found,
                num_found,
                blocks,
                full_sequence_must_fit=True,
                has_scheduled_reqs=False,
            )
            spent += clock() - a
            if given is None:
                manager.free(request)
                continue
            num_hits += num_found // block_size
            request.num_computed_tokens = length
            if num_outputs > 1:  # the last output is not written to the cache
                request.append_output_token_ids([0] * (num_outputs - 1))
                num_filled = (length + num_outputs - 1) // block_size - len(hashes)
                names = [b"%d output %d" % (number, index) for index in range(num_filled)]
                request.block_hashes = hashes + [name.ljust(KEY_BYTES) for name in names]
                a = clock()
                manager.allocate_slots(request, num_outputs - 1)
                spent += clock() - a
            a = clock()
            manager.free(request)
            spent += clock() - a
    return {"request_us": spent / 1000 / len(rows), "manager_seconds": spent / 1e9, "hit_blocks": num_hits}


JOBS: dict[str, Callable[..., Numbers]] = {"step": step, "prompt": prompt, "trace": trace}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library must not look like a reply
    init_none_hash(get_hash_fn_by_name(HASH))
    for line in sys.stdin:
        arguments: dict[str, Any] = json.loads(line)
        print(json.dumps(JOBS[arguments.pop("job")](**arguments)), file=answers, flush=True)
    os._exit(0)  # the interpreter's shutdown fails on frozen objects


if __name__ == "__main__":
    main()
