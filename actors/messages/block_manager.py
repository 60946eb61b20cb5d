"""What the KV-block manager receives, and why a cached prefix ended where it did."""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

from .prompts import Pin


class MissReason(StrEnum):
    """Why a prompt's cached prefix ends where it does."""

    NONE = "none"
    """It does not: every block that may be reused was."""
    DISABLED = "disabled"
    """Prefix caching is off."""
    TOO_SHORT = "shorter_than_a_block"
    """No full block without the last prompt token."""
    EVICTED = "evicted"
    """The next block was there and has been reused for something else."""
    OTHER_DOMAIN = "other_domain"
    """The same tokens are there, under another tenant or salt. For operators only: a client must not learn it."""
    DIVERGED = "diverged"
    """The longest chain that is there goes on differently, or not at all."""
    NEEDS_PROMPT_LOGPROBS = "needs_prompt_logprobs"
    """The request reads nothing: it wants to know of every prompt position (`echo`, `prompt_logprobs`)."""


@attrs.frozen
class CacheMiss:
    reason: MissReason
    token: int
    """Position of the first prompt token that was not found."""


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """An ordered proposal for one step; one synchronous function of `core` walks it, and `Granted` is what came of it.

    Applied in the order of the fields. An empty proposal (no rows, no candidates) carries commits and frees when there
    is no next step.
    """

    step: int
    """Number of the step proposed; keys published by this walk belong to it."""
    failed_steps: list[int]
    """Steps that raised or were dropped, newest first: their pending keys are unpublished."""
    committed_steps: list[int]
    """Steps that are done, oldest first: their pending keys become committed."""
    filled_sequence_ids: list[int]
    filled_block_indexes: list[int]
    filled_keys: list[bytes]
    filled_parent_keys: list[bytes]
    filled_token_ids: list[list[int]]
    """Blocks that decoding completed in committed steps; their keys were not known before."""
    free_sequence_ids: list[int]
    """Sequences to release: ended, failed, or withdrawn."""
    row_ids: list[int]
    """Running sequences that need something of the KV cache in this step, in the order they are served: those that
    prefill, and those whose next position opens a block. The others are in the step unless they are preempted."""
    row_starts: list[int]
    """First position each row computes in this step."""
    row_counts: list[int]
    """Positions each row computes in this step."""
    victim_ids: list[int]
    """Whom to preempt when blocks run out, first victim first; empty where they are known to be enough."""
    candidate_ids: list[int]
    """Waiting sequences, in the order they are admitted."""
    candidate_num_tokens: list[int]
    """Tokens each has to compute, cached ones included."""
    candidate_num_prompt_tokens: list[int]
    """How many of them are the prompt's: after a preemption there are outputs too."""
    candidate_keys: list[list[bytes]]
    """Chain keys of each one's full blocks."""
    candidate_root_keys: list[bytes]
    """What each chain starts from."""
    candidate_token_ids: list[list[int]]
    """Each one's tokens. Never changed by whoever sends or gets them."""
    token_budget: int
    """Positions left for candidates once every row is served."""
    candidate_chunk_limit: int = 1 << 30
    """Most positions that one candidate computes in this step."""
    reset_prefix_cache: bool = False
    """Before anything else: from here on nothing that was published can be found."""
    unread_ids: list[int] = []
    """Candidates that no cached block may serve."""
    candidate_pins: dict[int, tuple[Pin, ...]] = {}
    """Prefixes to be kept, by candidate, of those that want any."""
