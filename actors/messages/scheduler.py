"""What the scheduler receives: requests, grants of the KV-block manager, and results of the executor."""

from __future__ import annotations

import attrs
import msgspec

from .block_manager import CacheMiss
from .prompts import Pin
from .sampling import SamplingParams
from .scores import StepScores


@attrs.frozen
class Submit:
    """One sequence, ready to run. Exactly one `Terminal` column entry will answer it."""

    sequence_id: int
    prompt_token_ids: list[int]
    root_key: bytes
    """Where the chain of block keys starts: domain, model, KV layout."""
    block_keys: list[bytes]
    """Chain keys of the prompt's full blocks, in order."""
    sampling: SamplingParams
    tenant: str = ""
    """Who is served, for policies that are fair among them."""
    priority: int = 0
    """Lower is served first, where the policy looks at it."""
    reads_cache: bool = True
    """Whether cached blocks may serve it. False: every position is computed, and published as ever."""
    pins: tuple[Pin, ...] = ()
    """Prefixes to be kept once they are computed, shortest first."""
    group_id: int = 0
    """The first sequence of its request; 0 for one that is alone."""
    num_to_come: int = 0
    """Sequences of its request that follow: they are let in or refused together."""
    tokens_to_come: int = 0
    """Prompt tokens of those."""


@attrs.frozen
class Abort:
    """End a sequence: its client left, or a stop string was found, or a sibling failed. Ignored if it has ended."""

    sequence_id: int
    ends_group: bool = False
    """It is its request's first, and no other will be submitted."""


@attrs.frozen
class ResetPrefixCache:
    """Nothing that has been published is found any more; what is held drains. Requests sent after it miss."""


class Granted(msgspec.Struct, frozen=True, gc=False):
    """What the walk of one `Reserve` came to. Of the sequences it proposed, those not named got nothing."""

    step: int
    sequence_ids: list[int]
    """Rows first, then admitted candidates."""
    starts: list[int]
    counts: list[int]
    new_blocks: list[list[int]]
    """Physical blocks appended to each one's table; for a candidate its whole table so far."""
    admitted_ids: list[int]
    admitted_reused: list[int]
    """Prompt tokens in cached blocks, per admitted sequence: the *reused* entry of the books."""
    admitted_misses: list[CacheMiss]
    """Why each one's hit ends where it does."""
    admitted_copy_sources: list[int]
    """A block with what each one's last block will hold, to be copied and not to be kept; 0, the null block, where
    there is none."""
    preempted_ids: list[int]
    written_ids: list[int]
    written_starts: list[int]
    written_ends: list[int]
    """Prompt positions in blocks that a sequence was the first to commit, by the commits of this walk."""
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks that nobody holds but whose contents can be hit."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Prompt tokens of each one's prefixes that the commits of this walk have pinned, or found pinned."""
    num_pinned_blocks: int = 0
    """Blocks that no sequence holds, but a pin does. They are not free."""
    num_pins_yielded: int = 0
    """Pins that this walk has let go because somebody needed blocks."""


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """What one pass did; every row is booked, whatever happened to its sequence meanwhile."""

    step: int
    generation: int
    row_ids: list[int]
    row_epochs: list[int]
    row_starts: list[int]
    row_ends: list[int]
    """Spans of positions whose KV was written: the *computed* entries of the books."""
    sampled_rows: list[int]
    """Indexes into the rows that drew a token."""
    sampled_token_ids: list[int]
    read_ids: list[int]
    """Sequences whose first step of an admission this was."""
    read_tokens: list[int]
    """Tokens in granted blocks that the executor's own tags confirm: the *read* entry of the books."""
    seconds: float
    scores: StepScores | None = None
    """None, as nearly always: nobody asks."""
    copied_tokens: list[int] = []
    """Parallel to `read_ids`: tokens behind those whose KV was copied from a lent block, once its tag was confirmed:
    the *copied* entry. Empty: none."""


@attrs.frozen
class StepFailed:
    step: int
    generation: int
    error: str


@attrs.frozen
class StepDropped:
    step: int
    generation: int


StepResult = StepDone | StepFailed | StepDropped
