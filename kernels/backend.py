"""The protocol that every backend implements, and what one is made from.

The executor is the only caller: it makes one backend at start (`load.py`), and launches and collects each pass, from
one thread. Operations, memory layouts and graphs are internal to a backend.

What must always hold:
- a pass either raises, in `launch` or in `collect`, and then none of its tokens is used, or has written the KV of every
  token of the batch and drawn a token for every row that samples;
- passes are collected in the order in which they were launched;
- if `capabilities.invariant`, a row's logits depend on its own tokens only: not on the batch, the chunking, the cached
  prefix or the physical blocks that hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import attrs

from .batch import Drawn, StepBatch

QUANTIZED_BY_VLLM = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
)
"""Values of `--quantization` by which vLLM quantizes while it loads; other backends have `quantizing.QUANTIZATIONS`."""


@attrs.frozen
class Capabilities:
    """What a backend reports about itself."""

    name: str
    """`cpu`, `triton`, `vllm`, `transformers`, `reference` or `fake`."""
    dtype: str
    """Dtype of weights that are not quantized: `bfloat16`, `float16`, `float32`."""
    invariant: bool
    """Whether a row's results are bit-identical whatever the batch, as this backend is configured."""
    kv_cache_dtype: str
    """Dtype of the KV cache, likewise, or `int8`: with a scale for each token and head."""
    weights: str = "none"
    """Format of most of the linear weights: `bfloat16`, `int8`, `int4-g32`, `q4_k`. They may be held dequantized."""
    activations: str = "float"
    """What quantized matrices are multiplied with: `float`, or `int8`."""
    instruction_set: str | None = None
    """What the kernels were compiled for, if known: `avx2`."""
    num_threads: int | None = None
    """Threads of a pass, if it runs on the CPU."""
    verifies_drafts: bool = False
    """Whether a row may read what another row of the same pass and the same sequence writes."""
    runs_beside_host: bool = False
    """Whether a pass may still run when it has been launched, so that the next one can be launched behind it."""
    library: str | None = None
    """What computes, if it is not this package: `vllm 0.32.0 CPU_ATTN`."""

    @property
    def determinism(self) -> str:
        return "strict" if self.invariant else "fast"


@attrs.frozen
class KVMemory:
    """The operator's setting for the KV cache's memory; if neither is set, the backend chooses."""

    num_bytes: int | None = None
    utilization: float | None = None
    """Share of the device's memory that this process may hold in total, including weights and the largest pass."""


@attrs.frozen
class MemoryPlan:
    """How a device's memory is divided; `kv_cache_size.py` decides it. Sizes are in bytes."""

    num_blocks: int
    """Physical blocks, including the null block (number 0, never written by a row)."""
    block_size: int
    block_bytes: int
    """Keys and values of one block in all layers."""
    max_model_len: int
    """The configured length, or a shorter one if that was allowed."""
    weights_bytes: int
    """Weights as they are held, packed or widened."""
    workspace_bytes: int | None
    """Peak memory of the largest pass; None if it was not measured because nothing depends on it."""


@attrs.frozen
class BackendConfig:
    """What a backend is made from. Sizes are in tokens or blocks."""

    model_path: Path
    """A folder in the Hugging Face layout (`config.json` at least)."""
    dtype: str
    """`auto`: the checkpoint's own."""
    load_format: str
    """`auto` (`gguf` means the same): what the folder has; `dummy`: random weights with the shapes of config.json."""
    block_size: int
    num_blocks: int | None
    """Physical blocks, including the null block; None: as many as `kv_memory` allows."""
    max_num_seqs: int
    """Slots are numbered from 0 to this, exclusive."""
    max_model_len: int
    max_num_batched_tokens: int
    kv_memory: KVMemory = KVMemory()
    may_shorten: bool = False
    """Whether a `max_model_len` that does not fit into the cache is shortened instead of refused."""
    num_sharing: int = 1
    """Engines that share the device's memory, this one included: each sizes itself as one of so many."""
    memory_share: int | None = None
    """Bytes of the host's memory that this process may hold in all, if it computes there; None: what is free."""
    host_tier_bytes: int = 0
    """Bytes of the host's memory that this process will allocate for blocks that leave the device."""
    num_staged_blocks: int = 0
    """Blocks for which it will allocate memory there to move them to and from a disk or an object store."""
    shares_cache: bool = False
    """Whether the cache is to lie in memory that other processes of the machine may map, where that is possible."""
    kv_cache_dtype: str = "auto"
    """A dtype (see `Capabilities`), or `auto`: that of the weights."""
    determinism: str = "auto"
    """`strict`, `fast`, or `auto`: strict if that costs nothing."""
    quantization: str | None = None
    """How weights are quantized while loading, if the checkpoint has not: see `quantizing.QUANTIZATIONS`, and for
    vLLM `QUANTIZED_BY_VLLM`."""
    activations: str = "auto"
    """What quantized matrices are multiplied with: `int8`, `float`, or `auto`: what the checkpoint was made for."""
    enforce_eager: bool = False
    """Whether kernels are launched one by one: no CUDA graphs, no compiled model."""
    tensor_parallel_size: int = 1
    """Ranks among which each matrix is divided."""
    max_loras: int = 0
    """Adapters that may be loaded at a time."""
    max_lora_rank: int = 16
    """The highest rank of an adapter."""
    trust_remote_code: bool = False
    """Whether code in the checkpoint's folder may be run to load it."""
    draft_model: Path | None = None
    """The folder of a draft model, which another backend will load for the same device: it has as many blocks."""
    headless: bool = False
    """Whether the model is loaded without its output head, for vectors: its outputs are final hidden states."""
    ignored_config_entries: tuple[str, ...] = ()
    """Entries of `config.json` that are not understood, and known to change no result..."""
    ignored_in_draft_model: tuple[str, ...] = ()
    """...and those of the draft model's."""


class LaunchedPass(Protocol):
    """A pass that has been handed to the device."""

    def is_over(self) -> bool:
        """Return, without waiting, whether `collect` would not wait."""
        ...

    def collect(self) -> Drawn:
        """Wait for the pass and return what it drew. Must be called once."""
        ...


@attrs.frozen
class FinishedPass:
    """A pass that was over when it was launched."""

    drawn: Drawn

    def is_over(self) -> bool:
        return True

    def collect(self) -> Drawn:
        return self.drawn


class RunsAtOnce(ABC):
    """Base of backends that run a pass while it is launched, and have nothing to do while idle."""

    @abstractmethod
    def step(self, batch: StepBatch) -> Drawn:
        """Run one pass, as `Backend.launch` describes."""

    def launch(self, batch: StepBatch) -> LaunchedPass:
        return FinishedPass(self.step(batch))

    def while_idle(self) -> bool:
        return False

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        """See `Backend.load_adapter`. By default there are no adapters."""
        raise ValueError("this executor applies no adapters")

    def unload_adapter(self, digest: str) -> None:
        """See `Backend.unload_adapter`."""
        raise ValueError("this executor applies no adapters")


class Backend(Protocol):
    """Runs passes over one model and one paged KV cache."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def memory_plan(self) -> MemoryPlan: ...

    def launch(self, batch: StepBatch) -> LaunchedPass:
        """Begin one pass: write KV for every token, draw for every row with `samples`, score what `scoring` names.

        May return before the pass is over; then another may be launched behind it, if that neither scores nor changes
        logits. Until a pass is collected, nobody changes what its batch refers to.
        """
        ...

    def step(self, batch: StepBatch) -> Drawn:
        """Launch one pass and collect it."""
        ...

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        """Read an adapter, unless it is loaded; return its digest, by which `StepBatch.adapters` names it.

        May be called from any thread, also during a pass. Raises ValueError for an adapter that cannot be applied or
        whose digest is not `expected`, and if `max_loras` are loaded.
        """
        ...

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, likewise. No launched pass may have a row with it."""
        ...

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        """Return writable memory of the host for so many blocks of `memory_plan.block_bytes`, fast to copy from and to.

        Raises MemoryError.
        """
        ...

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy blocks of the cache to the host, `memory_plan.block_bytes` of each, one after the other.

        This and `write_blocks` may be called from any thread, also during a pass, which does not wait for them. No pass
        may write these blocks meanwhile; those that wrote them must be over. Raises ValueError for another size.
        """
        ...

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy to blocks of the cache what `read_blocks` of an equal backend has read: passes from now on see it.

        No pass may read or write these blocks meanwhile.
        """
        ...

    def while_idle(self) -> bool:
        """Do some milliseconds of work that a later pass would wait for. Return whether there may be more."""
        ...

    def close(self) -> None:
        """Free the device's memory. No other method is called afterwards."""
        ...


class SharesBlocks(Protocol):
    """A backend that reads blocks of another's cache where they are, and whose own may be read. Not all can.

    The peer's mover looks for these by their names (`actors/engine/mover/peer_copies.py`).
    """

    @property
    def cache_descriptor(self) -> int | None:
        """The memory of the cache, for others to map; None if it is not shared."""
        ...

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of the cache of an equal backend, perhaps of another size, as `write_blocks` does.

        What is copied may be overwritten meanwhile: its owner knows. Raises ValueError for blocks that there are not.
        """
        ...


def wants_strict(determinism: str, *, strict_is_free: bool) -> bool:
    """Return whether a backend that supports both modes runs strict. Raises ValueError for an unknown mode."""
    if determinism not in ("auto", "strict", "fast"):
        raise ValueError(f"unknown determinism {determinism!r}: choose 'strict', 'fast' or 'auto'")
    return determinism == "strict" or (determinism == "auto" and strict_is_free)


def refuse_int8_activations(activations: str, executor: str) -> None:
    """Raises ValueError if activations are to be int8, for a backend that has no such kernels, or are unknown."""
    if activations not in ("auto", "float", "int8"):
        raise ValueError(f"unknown activations {activations!r}: choose 'auto', 'float' or 'int8'")
    if activations == "int8":
        raise ValueError(f"the {executor} executor has no kernels for int8 activations: --activations must not be int8")
