"""What the supervisor hears of an engine: that it is ready, that it refuses to start, that it is alive."""

from __future__ import annotations

import attrs


@attrs.frozen
class EngineReady:
    """First message of an engine's incarnation: what it serves with."""

    incarnation: int
    num_blocks: int
    block_size: int
    backend: str
    dtype: str
    max_model_len: int | None = None
    """None: as configured."""
    instruction_set: str | None = None
    determinism: str = "strict"
    """What runs: `strict` (a row's bits do not depend on its batch, chunks and cache) or `fast`."""
    num_threads: int | None = None
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int | None = None
    """What the largest pass took at its highest; None where it was not run."""


@attrs.frozen
class EngineRefused:
    """Only message of an engine that cannot serve as it is configured, now or later."""

    reason: str


@attrs.frozen
class Alive:
    """Said by an engine every second, also during a step: its loop runs."""

    step: int
    """The step that the executor runs; 0: none."""
    seconds: float
    """Since it began, by the engine's clock."""
