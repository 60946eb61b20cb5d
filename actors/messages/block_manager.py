"""What the KV-block manager receives, and why a cached prefix ended where it did."""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

from .images import PromptImage
from .peers import Peer
from .prompts import Pin


class MissReason(StrEnum):
    """Why a prompt's cached prefix ends where it does."""

    NONE = "none"
    """No miss: every block that may be reused was."""
    DISABLED = "disabled"
    TOO_SHORT = "shorter_than_a_block"
    """The prompt without its last token does not fill a block."""
    EVICTED = "evicted"
    """The next block was cached and has been evicted."""
    OTHER_DOMAIN = "other_domain"
    """The same tokens are cached under another tenant or salt. For operators only: clients must not be told."""
    DIVERGED = "diverged"
    """The longest cached chain continues differently or ends."""
    NEEDS_PROMPT_LOGPROBS = "needs_prompt_logprobs"
    """The request asks for the scores of every prompt position (`echo`, `prompt_logprobs`), so all are computed."""
    NEEDS_EVERY_POSITION = "needs_every_position"
    """The prompt's embedding is a mean over all its positions, so all are computed."""
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"
    """The next blocks are in a lower tier, from which loading them would take longer than computing them."""
    LOAD_FAILED = "load_failed"
    """The next block was asked of a lower tier and did not come, for one of the reasons in `LoadFailure`."""


UNREAD = frozenset({MissReason.NEEDS_PROMPT_LOGPROBS, MissReason.NEEDS_EVERY_POSITION})
"""Why a sequence may not read the cache, if it may not."""


class MissDetail(msgspec.Struct, array_like=True, frozen=True):
    """The cause of a cache miss, if it is still known."""

    sequence_id: int
    """`diverged`: the sequence that wrote the block which continues differently; `evicted`: the one that was given the
    evicted block's place. 0: not known."""
    evicted_ago_s: float | None = None
    """`evicted`: how long before the miss."""
    idle_s: float | None = None
    """`evicted`: how long no sequence had held the block when it was evicted. None: not known."""
    num_evicted_since: int = 0
    """`evicted`: blocks evicted from then on, this one included: as many more would have kept it cached."""


@attrs.frozen
class CacheMiss:
    reason: MissReason
    token: int
    """Position of the first uncached prompt token."""
    detail: MissDetail | None = attrs.field(default=None, eq=False)
    """Not part of usage records."""


@attrs.frozen
class LookUp:
    """Report what a sequence with this prompt would find in the cache. Answered by `LookedUp`."""

    number: int
    prompt_token_ids: list[int]
    root_key: bytes
    block_keys: list[bytes]
    reads_cache: bool = True
    affinity: bytes = b""
    """Affinity key for the router, which asks the engine that it would send such a sequence to."""
    prefetch: bool = False
    """Begin to load what is found in lower tiers, if there is room. If False, nothing is changed."""
    num_shared_blocks: int = 0
    """As of a `Submit`."""


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """What the scheduler asks for one step, and what it has to say about earlier ones. Answered by `Granted`.

    Processed in the order that `block_manager/reservation.py` describes. Without rows and candidates it carries commits
    and frees when there is no next step.
    """

    step: int
    """Number of the proposed step; the keys that this message publishes belong to it."""
    failed_steps: list[int]
    """Steps that raised or were dropped, newest first: their pending keys are unpublished."""
    committed_steps: list[int]
    """Steps that are done, oldest first: their pending keys become committed."""
    filled_sequence_ids: list[int]
    filled_block_indexes: list[int]
    filled_keys: list[bytes]
    filled_parent_keys: list[bytes]
    filled_token_ids: list[list[int]]
    """Blocks that decoding filled in committed steps; their keys were not known before."""
    free_sequence_ids: list[int]
    """Sequences to release: ended, failed, or returned to the queue."""
    row_ids: list[int]
    """Running sequences that need something from the KV cache in this step, in the order of being served: those that
    prefill, and those whose next position opens a block. The others run unless they are preempted."""
    row_starts: list[int]
    row_counts: list[int]
    victim_ids: list[int]
    """Whom to preempt when blocks run out, first victim first; empty if there were enough at the last grant."""
    candidate_ids: list[int]
    """Waiting sequences, in the order of admission."""
    candidate_num_tokens: list[int]
    """Tokens each has to compute, including cached ones."""
    candidate_num_prompt_tokens: list[int]
    """How many of these are prompt tokens: after a preemption there are output tokens too."""
    candidate_keys: list[list[bytes]]
    candidate_root_keys: list[bytes]
    candidate_token_ids: list[list[int]]
    """Each candidate's tokens. Neither side changes these lists."""
    token_budget: int
    """Positions left for candidates once every row is served."""
    candidate_chunk_limit: int = 1 << 30
    reset_prefix_cache: bool = False
    """Before anything else, forget all published keys."""
    unread_ids: list[int] = []
    """Candidates that may not use cached blocks."""
    broken_ids: list[int] = []
    """Sequences for which a committed step computed NaN or infinite logits: the keys that it published for them are
    unpublished, since the KV may hold NaN too."""
    candidate_pins: dict[int, tuple[Pin, ...]] = {}
    """Prefixes to pin, by candidate that asks for any."""
    candidate_tenants: dict[int, str] = {}
    """Tenants of candidates, if there are quotas for any."""
    token_s: float = 0.0
    """Seconds to compute a token in a step that is filled with prompts; 0: not known."""
    candidate_peers: dict[int, Peer] = {}
    """By candidate, the engine that may still have its blocks."""
    candidate_images: dict[int, tuple[PromptImage, ...]] = {}
    """By candidate, images within which no chunk may end (`shared/whole_images.py`)."""
    completes_images: bool = False
    """A chunk may be longer than all limits, if it would otherwise be a part of an image."""
    shared_keys: list[bytes] = []
    """Keys of which the router believes that the object store has them."""
    returned_ids: list[int] = []
    """Those of `free_sequence_ids` whose admission was undone because its first step failed. What was loaded for them
    counts as loaded at their next one."""
