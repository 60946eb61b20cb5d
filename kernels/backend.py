"""The protocol that every backend implements, and what one is made from.

The executor is the only caller: it makes one backend at start and calls `step` once a pass, from one thread. What
happens inside (operations, layouts, graphs) is the backend's own affair.

What must always hold:
- `step` either raises, and then nothing it drew is used, or has written the KV of every token of the batch and drawn
  a token for every row that samples;
- where `capabilities.invariant`, a row's logits depend on its own tokens only: not on the batch, the chunking, the
  cached prefix or which physical blocks hold it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import attrs

from .batch import Drawn, StepBatch


@attrs.frozen
class Capabilities:
    name: str
    """As `/server_info` and the logs call it: `cpu`, `triton`, `reference`, `fake`."""
    dtype: str
    """Of weights and KV: `bfloat16`, `float16`, `float32`."""
    invariant: bool
    """Rows' results are bit-identical whatever their batch, as this backend now runs."""
    instruction_set: str | None = None
    """What the kernels were compiled for, where that is known: `avx2`."""
    strict_is_free: bool = True
    """Bit-identical results cost nothing here: then they are the default, and `fast` asks for nothing else."""
    num_threads: int | None = None
    """That a pass runs on, where it runs on the machine's own processors."""

    @property
    def determinism(self) -> str:
        """What runs: `strict` or `fast`."""
        return "strict" if self.invariant else "fast"


@attrs.frozen
class KVMemory:
    """What the operator says of the KV cache's memory; neither is the backend's own choice."""

    num_bytes: int | None = None
    utilization: float | None = None
    """Share of the device's memory that this process may hold in all, weights and passes included."""


@attrs.frozen
class MemoryPlan:
    """What became of a device's memory; `kv_cache_size.py` decides it. Bytes."""

    num_blocks: int
    """Physical blocks, the null block (number 0, never written by a row) included."""
    block_size: int
    block_bytes: int
    """One block's keys and values in all layers."""
    max_model_len: int
    """What was configured, or shorter where that was allowed."""
    weights_bytes: int
    """As they are held, packed or widened."""
    workspace_bytes: int | None
    """What the largest pass took at its highest; None where it was not run, nothing depending on it."""


@attrs.frozen
class BackendConfig:
    """What a backend is made from. All sizes in tokens or blocks."""

    model_path: Path
    """A folder in the Hugging Face layout (`config.json` at least)."""
    dtype: str
    """`auto` takes the checkpoint's own."""
    load_format: str
    """`auto` (safetensors), or `dummy`: random weights in the shape of config.json."""
    block_size: int
    num_blocks: int | None
    """Physical blocks, the null block included; None leaves it to `kv_memory`."""
    max_num_seqs: int
    """Slots run from 0 to this, exclusive."""
    max_model_len: int
    max_num_batched_tokens: int
    kv_memory: KVMemory = KVMemory()
    may_shorten: bool = False
    """A `max_model_len` that the cache has no room for becomes shorter, instead of being refused."""
    determinism: str = "auto"
    """`strict`, `fast`, or `auto`: strict where that is free."""


class Backend(Protocol):
    """Runs passes over one model and one paged KV cache."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def memory_plan(self) -> MemoryPlan: ...

    def step(self, batch: StepBatch) -> Drawn:
        """Run one pass: write KV for every token, draw a token for every row with `samples`, score what is asked."""
        ...

    def close(self) -> None:
        """Free what the device holds. Nothing is called after it."""
        ...


def wants_strict(determinism: str, *, strict_is_free: bool) -> bool:
    """Whether a backend that has both ways runs the strict one. Raises ValueError for a mode that does not exist."""
    if determinism not in ("auto", "strict", "fast"):
        raise ValueError(f"unknown determinism {determinism!r}: choose 'strict', 'fast' or 'auto'")
    return determinism == "strict" or (determinism == "auto" and strict_is_free)
