"""What the ranks of one engine say to one another: rank 0, which is the engine's process, and those that follow it.

Sent over socket pairs (`followers.py`, `rank_process.py`). Nothing of vLLM is imported here.

    loading     RankMemory ◀── each follower         a pass    RunPass ──▶
                Profile ──▶, RankMemory ◀──                    RowsDrawn ──▶, or PassAbandoned ──▶
                KVPlan ──▶, Ready ◀──                          ComputeHead ──▶   for each piece of prompt scores
    copies      NewArena ──▶, CopyBlocks ──▶, BlocksCopied ◀──                   on a connection of their own

What must always hold: every rank enters the same collectives in the same order, so a message that begins one is sent
before rank 0 enters it; tokens cross, logits and masks never do.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .runner_requests import RunnerStep


@attrs.frozen
class RankPlace:
    """Which rank a process is."""

    rank: int = 0
    size: int = 1
    name: str = "alone"
    """Of the group of ranks, unique on this machine."""
    store: int | None = None
    """Descriptor of the memory through which the ranks find each other; None for one alone."""

    @property
    def leads(self) -> bool:
        return self.rank == 0


@attrs.frozen
class RankMemory:
    """What one rank holds and needs, in bytes."""

    block_bytes: int
    """Its part of a block."""
    weights_bytes: int
    held: int
    """All that its process holds, where the CPU computes."""
    measured: int = 0
    """Once it was profiled: the largest pass where the CPU computes, else what is available for the cache."""


@attrs.frozen
class Profile:
    """Run the largest pass, with all ranks."""


@attrs.frozen
class KVPlan:
    """Allocate the cache."""

    num_blocks: int
    max_model_len: int


@attrs.frozen
class Ready:
    """The rank waits for passes."""


@attrs.frozen
class RunPass:
    step: RunnerStep
    copies: Sequence[tuple[int, int]]
    samples: Sequence[bool]
    """Whether each row of the step draws a token."""


@attrs.frozen
class RowsDrawn:
    """What rank 0 has drawn in the pass that is running, with runner V1."""

    order: list[int]
    """The rows of the step in the order of its runner, which must be that of every runner."""
    rows: list[int]
    token_ids: list[int]


@attrs.frozen
class PassAbandoned:
    """Rank 0 has failed to draw: the pass is void."""


@attrs.frozen
class ComputeHead:
    """Compute the logits of tokens of the pass that was run last."""

    places: list[int]
    """In the runner's order."""


@attrs.frozen
class NewArena:
    """Map memory that all ranks share; its descriptor follows."""

    num_bytes: int


@attrs.frozen
class CopyBlocks:
    """Copy this rank's part of blocks to shared memory, or from it."""

    is_read: bool
    blocks: Sequence[int]
    arena: int
    start: int


@attrs.frozen
class BlocksCopied:
    error: str | None = None
