"""What an engine tells the supervisor: that it is ready, that it cannot serve, that it is alive (which both say)."""

from __future__ import annotations

import attrs


@attrs.frozen
class DraftModelMemory:
    """What an engine's draft model takes of the memory, beside the model. In bytes."""

    weights_bytes: int
    kv_cache_bytes: int


@attrs.frozen
class EngineReady:
    """First message of an engine's incarnation: what it serves with."""

    incarnation: int
    num_blocks: int
    block_size: int
    backend: str
    dtype: str
    max_model_len: int | None = None
    """None means as configured."""
    kv_cache_dtype: str | None = None
    instruction_set: str | None = None
    determinism: str = "strict"
    """The mode in use: `strict` (a row's bits do not depend on its batch, chunks or cache) or `fast`."""
    num_threads: int | None = None
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int | None = None
    """Peak memory of the largest pass; None if it was not run."""
    numerics: str = ""
    """Digest of all that determines the bits of a result. Engines with the same one draw the same tokens if they are
    strict."""
    weights: str = ""
    """Format of most of the linear weights: `bfloat16`, `int8`, `q4_k`."""
    activations: str = ""
    """What quantized weights are multiplied with: `float`, `int8`."""
    peer_address: str = ""
    """Where other engines may fetch its blocks; empty: nowhere."""
    library: str | None = None
    """The library that computes, and its version, unless it is this package: `vllm 0.32.0 CPU_ATTN`."""
    draft_model: DraftModelMemory | None = None
    """None if there is none."""


@attrs.frozen
class EngineRefused:
    """Only message of an engine that cannot serve as configured, so that restarting it would not help."""

    reason: str


@attrs.frozen
class Heartbeat:
    """Sent both ways at a fixed interval, by an engine also during a step, to show that the sender's loop runs."""

    step: int
    """The step that the executor is running; 0 if there is none, and from the web side."""
    seconds: float
    """Time since the step began, by the engine's clock."""
