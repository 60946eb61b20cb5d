"""How many blocks the KV cache gets: by the operator's setting, by a profile run, or by a conservative default.

A backend calls `plan_memory` once, after loading its weights and before allocating its cache, and exposes the result as
`Backend.memory_plan`, from which block manager, scheduler, metrics and `/server_info` take the number of blocks.

Several engines may share a device's memory. None looks at what the others hold, which changes while they load and while
their caches fill: each keeps to its own share (`memory_share`, measured before the first of them was started), and to
one part in `num_sharing` of what is a share of the whole memory.

What must always hold: a cache that cannot hold one sequence of the maximum length is refused, unless that length may be
shortened; and the cache never exceeds the available memory, less what the host tier and the buffers of other tiers will
take of the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs

from .backend import BackendConfig, KVMemory, MemoryPlan
from .machine import Memory

DEFAULT_BYTES = 4 << 30
"""Default size in the host's memory; vLLM uses the same for CPUs."""
DEFAULT_CONTEXTS = 16
"""Sequences of the maximum length beyond which the default size does not grow."""

_log = logging.getLogger(__name__)


@attrs.frozen
class DraftMemory:
    """What a draft model will take of the same memory, once the cache is allocated. In bytes."""

    block_bytes: int = 0
    """Its keys and values of one block: it has as many."""
    weights_bytes: int = 0


@attrs.frozen
class DeviceMemory:
    """What a backend knows about its device's memory once its weights are loaded. In bytes."""

    block_bytes: int
    weights_bytes: int
    held: int
    """Device memory that this process holds, including weights."""
    profile: Callable[[], int]
    """Runs the largest pass and returns its peak memory. Called at most once, if the size depends on it."""
    memory: Callable[[], Memory]
    """Returns the device's memory. Called after the profile run, if there is one."""
    default: KVMemory = attrs.field(factory=KVMemory)
    """Used if the operator has set nothing. If empty: a size that leaves memory for other processes."""
    share: int | None = None
    """What this process may hold in all; None: what is available."""
    host_tier: int = 0
    """What of it this process will take for the host tier of the KV cache; on devices with memory of their own none."""
    num_staged: int = 0
    """Blocks for which it will take memory there to move them to and from other tiers; likewise."""

    adapters: int = 0
    """What of it adapters will take once they are loaded."""
    draft: DraftMemory = DraftMemory()

    @property
    def cached_bytes(self) -> int:
        """Bytes of one block in the caches of the model and of the draft model."""
        return self.block_bytes + self.draft.block_bytes

    @property
    def staging(self) -> int:
        return self.num_staged * self.block_bytes

    def available(self) -> int:
        """Return what can be allocated now, within the share, and may be."""
        available = self.memory().available
        if self.share is not None:
            available = min(available, self.share - self.held)
        return max(0, available - self.host_tier - self.staging - self.adapters - self.draft.weights_bytes)


@attrs.frozen
class _Choice:
    num_blocks: int
    said: str
    """Where the size comes from, for messages."""
    workspace_bytes: int | None


def plan_memory(config: BackendConfig, device: DeviceMemory) -> MemoryPlan:
    """Choose the size of the cache.

    Raises ValueError if it is not possible, naming the memory that is needed and the flag to change.
    """
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


def check_weights_fit(num_bytes: int, memory: Memory, *, num_sharing: int = 1, share: int | None = None) -> None:
    """Raises ValueError if weights exceed the available memory: the process would be killed while loading.

    Every engine has a copy of its own; `share` is the part of the memory that this one of `num_sharing` may hold.
    """
    if share is not None and num_bytes > share:
        raise ValueError(
            f"the weights take {show(num_bytes)} of memory in each of {num_sharing} engines, and {show(share)} of "
            f"{show(memory.total)} are available to each: lower --engines"
        )
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
        return _Choice(asked.num_bytes // device.cached_bytes, f"--kv-cache-memory {show(asked.num_bytes)}", None)
    workspace = device.profile()
    memory = device.memory()
    if asked.utilization is not None:
        num_bytes = int(memory.total * asked.utilization) // config.num_sharing - device.held - workspace
        num_bytes -= device.host_tier + device.staging + device.adapters
        if device.draft.block_bytes:
            num_bytes -= device.draft.weights_bytes + workspace  # its largest pass is no larger
        said = (
            f"--gpu-memory-utilization {asked.utilization:g} of {show(memory.total)}{_each(config)}, less "
            f"{show(device.held)} held and {show(workspace)} for the largest pass{_beside(device)},"
        )
        return _Choice(max(0, num_bytes) // device.cached_bytes, said, workspace)
    enough = 1 + DEFAULT_CONTEXTS * _num_blocks(config)
    num_bytes = min(DEFAULT_BYTES, memory.total // 4 // config.num_sharing, device.available() // 2)
    said = f"the default of {show(num_bytes)}{_each(config)}"
    return _Choice(min(enough, num_bytes // device.cached_bytes), said, workspace)


def _check(config: BackendConfig, device: DeviceMemory, choice: _Choice, longest: int) -> None:
    needed = (1 + _num_blocks(config)) * device.cached_bytes
    if longest < config.block_size or (longest < config.max_model_len and not config.may_shorten):
        shorter = f", or lower --max-model-len to {longest}" if longest >= config.block_size else ""
        raise ValueError(
            f"one sequence of {config.max_model_len} tokens (max_model_len) needs {show(needed)} of KV cache, and "
            f"{choice.said} gives {show(choice.num_blocks * device.cached_bytes)} ({choice.num_blocks} blocks of "
            f"{config.block_size} tokens, one of them the null block): give it --kv-cache-memory {show(needed)} or "
            f"more{shorter}"
        )
    available = device.available()
    if choice.num_blocks * device.cached_bytes > available:
        raise ValueError(
            f"{choice.said} asks for {show(choice.num_blocks * device.cached_bytes)} of KV cache, and "
            f"{show(available)} of memory is available{_beside(device)}{_each(config)}: lower it"
        )


def _beside(device: DeviceMemory) -> str:
    """Return words to follow an amount from which the memory of other tiers is deducted."""
    parts = [f"--kv-host-memory {show(device.host_tier)}"] if device.host_tier else []
    parts += [f"{show(device.staging)} for blocks on their way to other tiers"] if device.num_staged else []
    parts += [f"{show(device.adapters)} for adapters (--max-loras)"] if device.adapters else []
    parts += (
        [f"{show(device.draft.weights_bytes)} for the draft model (--draft-model)"] if device.draft.block_bytes else []
    )
    return f", less {' and '.join(parts)}" if parts else ""


def _each(config: BackendConfig) -> str:
    """Return words to follow an amount of memory of which there is one for each engine."""
    return f" for each of {config.num_sharing} engines (--engines)" if config.num_sharing > 1 else ""


def _num_blocks(config: BackendConfig) -> int:
    """Return the blocks of one sequence of the maximum length."""
    return -(-config.max_model_len // config.block_size)


def show(num_bytes: int) -> str:
    """Format bytes as flags take them (`1.50GiB`), rounded up."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{-(-num_bytes * 100 // size) / 100:.2f}{unit}"
    return str(num_bytes)
