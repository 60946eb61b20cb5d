"""How many blocks the KV cache gets: from what the operator said, from a profile run, or from a careful default.

A backend calls `plan_memory` once, when its weights are loaded and before it makes its cache, and offers the result as
`Backend.memory_plan`; block manager, scheduler, metrics and `/server_info` have their number of blocks from there.

What must always hold: a pool that one sequence of the longest length does not fit into is refused, or that length is
shortened where nobody asked for it; and no more memory is promised than there is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs

from .backend import BackendConfig, KVMemory, MemoryPlan
from .machine import Memory

DEFAULT_BYTES = 4 << 30
"""Of a machine's own memory, where nobody says how much: vLLM's figure for CPUs, too."""
DEFAULT_CONTEXTS = 16
"""Sequences of the longest length that are room enough where nobody says how much."""

_log = logging.getLogger(__name__)


@attrs.frozen
class DeviceMemory:
    """What a backend knows once its weights are loaded. Bytes."""

    block_bytes: int
    """One block's keys and values in all layers."""
    weights_bytes: int
    """As they are held, packed or widened."""
    held: int
    """Of the device's memory by this process, weights included."""
    profile: Callable[[], int]
    """Runs the largest pass: what it takes on top at its highest. Called where the size depends on it, once."""
    memory: Callable[[], Memory]
    """Called after the profile run, if there is one."""
    default: KVMemory = attrs.field(factory=KVMemory)
    """Where the operator says nothing. If it says nothing either: what suits memory that others need, too."""


@attrs.frozen
class _Choice:
    num_blocks: int
    said: str
    """By whom, with the flag's name."""
    workspace_bytes: int | None


def plan_memory(config: BackendConfig, device: DeviceMemory) -> MemoryPlan:
    """Raises ValueError, saying how much is needed and which flag to change, where the pool cannot be had."""
    choice = _choose(config, device)
    longest = max(0, choice.num_blocks - 1) * config.block_size
    _check(config, device, choice, longest)
    if longest < config.max_model_len:
        _log.warning(
            "max_model_len is shortened to %d of %d tokens: %s gives %d KV blocks (ask for a length with "
            "--max-model-len, for more memory with --kv-cache-memory)",
            *(longest, config.max_model_len, choice.said, choice.num_blocks),
        )
    return MemoryPlan(
        num_blocks=choice.num_blocks,
        block_size=config.block_size,
        block_bytes=device.block_bytes,
        max_model_len=min(longest, config.max_model_len),
        weights_bytes=device.weights_bytes,
        workspace_bytes=choice.workspace_bytes,
    )


def check_weights_fit(num_bytes: int, memory: Memory) -> None:
    """Raises ValueError where weights are larger than what is available: better than to be killed half way."""
    if num_bytes > memory.available:
        raise ValueError(
            f"the weights take {show(num_bytes)} of memory, and {show(memory.available)} of {show(memory.total)} are "
            f"available"
        )


def _choose(config: BackendConfig, device: DeviceMemory) -> _Choice:
    if config.num_blocks is not None:
        return _Choice(config.num_blocks, f"--num-blocks {config.num_blocks}", None)
    asked = config.kv_memory if config.kv_memory != KVMemory() else device.default
    if asked.num_bytes is not None:
        return _Choice(asked.num_bytes // device.block_bytes, f"--kv-cache-memory {show(asked.num_bytes)}", None)
    workspace = device.profile()
    memory = device.memory()
    if asked.utilization is not None:
        num_bytes = int(memory.total * asked.utilization) - device.held - workspace
        said = (
            f"--gpu-memory-utilization {asked.utilization:g} of {show(memory.total)}, less {show(device.held)} held "
            f"and {show(workspace)} for the largest pass,"
        )
        return _Choice(max(0, num_bytes) // device.block_bytes, said, workspace)
    enough = 1 + DEFAULT_CONTEXTS * _num_blocks(config)
    num_bytes = min(DEFAULT_BYTES, memory.total // 4, memory.available // 2)
    return _Choice(min(enough, num_bytes // device.block_bytes), f"the default of {show(num_bytes)}", workspace)


def _check(config: BackendConfig, device: DeviceMemory, choice: _Choice, longest: int) -> None:
    needed = (1 + _num_blocks(config)) * device.block_bytes
    if longest < config.block_size or (longest < config.max_model_len and not config.may_shorten):
        shorter = f", or lower --max-model-len to {longest}" if longest >= config.block_size else ""
        raise ValueError(
            f"one sequence of {config.max_model_len} tokens (max_model_len) needs {show(needed)} of KV cache, and "
            f"{choice.said} gives {show(choice.num_blocks * device.block_bytes)} ({choice.num_blocks} blocks of "
            f"{config.block_size} tokens, one of them the null block): give it --kv-cache-memory {show(needed)} or "
            f"more{shorter}"
        )
    available = device.memory().available
    if choice.num_blocks * device.block_bytes > available:
        raise ValueError(
            f"{choice.said} asks for {show(choice.num_blocks * device.block_bytes)} of KV cache, and {show(available)} "
            f"of memory are left: lower it"
        )


def _num_blocks(config: BackendConfig) -> int:
    """Of one sequence of the longest length."""
    return -(-config.max_model_len // config.block_size)


def show(num_bytes: int) -> str:
    """`1.50GiB`, as the flags take it; never less than it is."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{-(-num_bytes * 100 // size) / 100:.2f}{unit}"
    return str(num_bytes)
