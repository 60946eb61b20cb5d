"""From flags and checkpoint to every size of the server, and to what `/server_info` shows of them.

Used by `serve.py`. What must always hold: whatever the engine is started with is shown.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import structlog

from quipu.actors.config import EngineConfig, RuntimeConfig
from quipu.actors.request_desk.interface import ServingInfo
from quipu.actors.shared.checkpoint import CheckpointError, CheckpointInfo, read_info, resolve

log = structlog.get_logger("quipu.cli")

WAITING_PER_SEAT = 4
"""Sequences that may wait, by default, for each that may run."""
LEAST_WAITING = 1024
"""However few may run: the largest request (`AppOptions.max_sequences`) fits into one tenant's half."""
WAITING_TOKENS_EACH = 2048
"""Prompt tokens that may wait, by default, for each sequence that may wait."""
LEAST_WAITING_PROMPTS = 8
"""Prompts of the longest length that may wait however few may run."""
TENANT_SHARE = 0.5
"""Of what may wait, one tenant's part where there are several."""


def resolve_config(arguments: argparse.Namespace) -> tuple[RuntimeConfig, ServingInfo]:
    """Every size of the server, from flags and the checkpoint. Raises CheckpointError."""
    path = resolve(arguments.model)
    checkpoint = read_info(path, name=_model_name(arguments.model), dtype=arguments.dtype)
    names = tuple(arguments.served_model_name or [checkpoint.name])
    max_model_len, num_blocks = _resolve_sizes(arguments, checkpoint)
    max_num_seqs = min(arguments.max_num_seqs, arguments.max_num_batched_tokens)
    engine = EngineConfig(
        model_path=str(path),
        executor=arguments.executor,
        dtype=checkpoint.dtype,
        load_format=arguments.load_format,
        block_size=arguments.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=arguments.kv_cache_memory,
        memory_utilization=arguments.gpu_memory_utilization,
        may_shorten=arguments.max_model_len is None,
        determinism=arguments.determinism,
        num_threads=arguments.threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        enable_prefix_caching=arguments.enable_prefix_caching,
        share_pending_prefixes=arguments.share_pending_prefixes,
        max_pinned_share=arguments.max_pinned_share,
        scheduling_policy=arguments.scheduling_policy,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        max_waiting_requests=_or_default(
            arguments.max_waiting_requests, max(WAITING_PER_SEAT * max_num_seqs, LEAST_WAITING)
        ),
        max_waiting_tokens=_or_default(
            arguments.max_waiting_tokens,
            max(WAITING_PER_SEAT * max_num_seqs * WAITING_TOKENS_EACH, LEAST_WAITING_PROMPTS * max_model_len),
        ),
        # only a key file knows several tenants
        max_waiting_share=1.0 if arguments.key_file is None else TENANT_SHARE,
        log_level=arguments.log_level,
        fake_step_seconds=arguments.fake_step_seconds,
        fake_poison_token_id=arguments.fake_poison_token_id,
        fake_token_id=arguments.fake_token_id,
        kv_events=arguments.kv_events_config,
    )
    config = RuntimeConfig(
        engine=engine,
        model_names=names,
        vocab_size=checkpoint.vocab_size,
        kv_dtype=checkpoint.dtype,
        chat_template_timeout_s=arguments.chat_template_timeout,
        step_timeout_s=arguments.step_timeout,
    )
    info = ServingInfo(
        model_names=names,
        created=int(time.time()),
        max_model_len=max_model_len,
        block_size=engine.block_size,
        num_blocks=num_blocks,
        vocab_size=checkpoint.vocab_size,
        settings={
            "model": arguments.model,
            "dtype": checkpoint.dtype,
            "load_format": engine.load_format,
            "executor": engine.executor,
            "block_size": engine.block_size,
            "num_blocks": num_blocks,
            "kv_cache_memory": engine.kv_cache_bytes,
            "gpu_memory_utilization": engine.memory_utilization,
            "determinism": engine.determinism,
            "threads": engine.num_threads,
            "max_model_len": max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "share_pending_prefixes": engine.share_pending_prefixes,
            "max_pinned_share": engine.max_pinned_share,
            "scheduling_policy": engine.scheduling_policy,
            "allow_client_priority": arguments.allow_client_priority,
            "long_prefill_token_threshold": engine.long_prefill_token_threshold,
            "max_waiting_requests": engine.max_waiting_requests,
            "max_waiting_tokens": engine.max_waiting_tokens,
            "max_waiting_share": engine.max_waiting_share,
            "request_timeout": arguments.request_timeout,
            "step_timeout": config.step_timeout_s,
            "max_body_bytes": arguments.max_body_bytes,
            "max_body_memory": arguments.max_body_memory,
            "chat_template_timeout": config.chat_template_timeout_s,
            "kv_events_endpoint": engine.kv_events.endpoint if engine.kv_events else None,
            "data_dir": arguments.data_dir,
        },
    )
    return config, info


def _or_default(asked: int | None, default: int) -> int:
    """0 is asked for as well: no limit."""
    return default if asked is None else asked


def _resolve_sizes(arguments: argparse.Namespace, checkpoint: CheckpointInfo) -> tuple[int, int | None]:
    """(max_model_len, num_blocks) that fit each other; blocks that depend on memory are counted by the engine."""
    block_size = arguments.block_size
    asked = arguments.max_model_len
    if asked is not None and asked > checkpoint.max_model_len:
        raise CheckpointError(f"--max-model-len {asked} is more than the model's {checkpoint.max_model_len}")
    wanted = asked or checkpoint.max_model_len
    num_blocks = arguments.num_blocks
    if num_blocks is None:
        return wanted, None
    capacity = (num_blocks - 1) * block_size
    if capacity < 2:
        raise CheckpointError(f"--num-blocks {num_blocks} leaves no room: the null block takes one")
    if wanted <= capacity:
        return wanted, num_blocks
    if asked is not None:
        raise CheckpointError(
            f"--max-model-len {asked} does not fit the KV cache of {capacity} tokens "
            f"({num_blocks} blocks of {block_size}, one of them the null block)"
        )
    log.info("config.context_shortened", max_model_len=capacity, model_max_len=wanted, num_blocks=num_blocks)
    return capacity, num_blocks


def _model_name(model: str) -> str:
    """What clients call it: a hub id as it stands, a folder by its own name."""
    return Path(model).resolve().name if Path(model).is_dir() else model
