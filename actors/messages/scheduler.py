"""What the scheduler receives: requests, grants from the KV-block manager, and results from the executor."""

from __future__ import annotations

import attrs
import msgspec

from quipu.kernels.step_types import SequenceKind as SequenceKind

from .block_manager import CacheMiss
from .images import PromptImage
from .peers import Peer
from .prompts import Pin
from .sampling import SamplingParams
from .scores import StepPayloads
from .tiers import TierReport, TierSpans


@attrs.frozen
class Submit:
    """One sequence, ready to run. It is answered by exactly one entry in the terminal columns of a `StepReport`."""

    sequence_id: int
    prompt_token_ids: list[int]
    root_key: bytes
    """Start of the chain of block keys: stands for domain, model and KV layout."""
    block_keys: list[bytes]
    """Chain keys of the prompt's full blocks, in order."""
    sampling: SamplingParams
    tenant: str = ""
    """The tenant that is served, for policies that are fair among tenants."""
    priority: int = 0
    """Lower values are served first under the `priority` policy."""
    is_batch: bool = False
    """Nobody waits for it: sequences of other requests are served first, and take its place."""
    reads_cache: bool = True
    """Whether it may use cached blocks. If False, every position is computed, and still published."""
    pins: tuple[Pin, ...] = ()
    """Prefixes to keep in the cache once they are computed, shortest first."""
    group_id: int = 0
    """Id of the first sequence of its group: of its request or, where several engines may serve its prompts, of its
    prompt. 0 if it is the only one."""
    num_to_come: int = 0
    """Number of sequences of its group that follow; all are accepted or rejected together."""
    tokens_to_come: int = 0
    """Prompt tokens of the sequences that follow."""
    is_resumed: bool = False
    """It was held by an engine that died; it is never rejected for lack of room."""
    takes_place: bool = False
    """It takes the place of a sequence of its request that has ended; it is never rejected for lack of room either."""
    output_token_ids: list[int] = attrs.field(factory=list)
    """Tokens already sampled for it and reported; generation continues after them."""
    num_scored: int = 1
    """Number of prompt tokens whose scores were reported, if requested; the first token has none."""
    affinity: bytes = b""
    """Affinity key for the router; empty if the client sent none."""
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    """Digest of the adapter it is computed with, also contained in its keys; empty for the model's own weights."""
    ends_after_prefill: bool = False
    """Whether this engine ends it with its first token, for another engine to continue."""
    peer: Peer | None = None
    """The engine that computed it so far, which may still have its blocks. None: this engine is its first, or the
    blocks are lost."""
    num_shared_blocks: int = 0
    """How many leading blocks of the prompt the object store has, as the router believes."""
    images: tuple[PromptImage, ...] = ()
    """Those of the prompt, in order; also contained in its keys."""


@attrs.frozen
class Abort:
    """End a sequence: its client left, a stop string was found, or another sequence of its request failed.

    Ignored if it has ended.
    """

    sequence_id: int
    ends_group: bool = False
    """Whether the sequence is the first of its group and no other will be submitted."""


@attrs.frozen
class ResetPrefixCache:
    """Forget all published keys. Blocks in use drain; requests sent after this message find nothing cached."""


@attrs.frozen
class AnnounceKeys:
    """Send a report now, with the keys that the block manager has to announce, and the number of its free blocks.

    Sent within the engine."""


@attrs.frozen
class LoadsOver:
    """Some sequences no longer need to wait for loads: the loads have ended, successfully or not, and their blocks are
    free again; or the loads are late. Sent by the KV-block manager."""

    sequence_ids: tuple[int, ...]


class Granted(msgspec.Struct, frozen=True, gc=False):
    """The answer to one `Reserve`. Sequences of the `Reserve` that are not listed here got no blocks."""

    step: int
    sequence_ids: list[int]
    """Rows first, then admitted candidates."""
    starts: list[int]
    counts: list[int]
    new_blocks: list[list[int]]
    """Physical blocks appended to each sequence's table; for a candidate, its whole table so far."""
    admitted_ids: list[int]
    admitted_reused: list[int]
    """Prompt tokens in cached blocks, per admitted sequence: the *reused* entry of the accounts."""
    admitted_misses: list[CacheMiss]
    """Why each sequence's cached prefix ends where it does."""
    admitted_copy_sources: list[int]
    """Per admitted sequence, a block with the contents of its last prompt block, to be copied but not held; 0 (the null
    block) if there is none."""
    preempted_ids: list[int]
    written_ids: list[int]
    written_starts: list[int]
    written_ends: list[int]
    """Ends of the prompt positions in blocks that a sequence was the first to commit, in this `Reserve`."""
    num_free_blocks: int
    num_cached_blocks: int
    """Free blocks whose contents can still be found."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Prompt tokens in prefixes that the commits of this `Reserve` pinned or found pinned."""
    num_pinned_blocks: int = 0
    """Blocks held only by pins. They are not free."""
    num_pins_yielded: int = 0
    """Pins released because sequences needed their blocks."""
    stored_keys: bytes = b""
    """The first 8 bytes of each key committed since the last grant."""
    removed_keys: bytes = b""
    """Prefixes of keys evicted since the last grant; disjoint from `stored_keys`."""
    is_cleared: bool = False
    """The cache was reset before these were stored."""
    lowered_keys: dict[str, bytes] = {}
    """By tier, prefixes of keys of which it is the fastest tier now, and was not at the last grant. Never `device`."""
    raised_keys: bytes = b""
    """Prefixes of keys that are on the device again."""
    shared_keys: bytes = b""
    """Prefixes of keys that this engine has found or stored in the object store, which all engines share..."""
    unshared_keys: bytes = b""
    """...and of those that turned out not to be there."""
    loading_ids: list[int] = []
    """Candidates that wait for blocks to be loaded. They must not be proposed until `LoadsOver` names them."""
    admitted_tier_spans: list[TierSpans] = []
    """Per admitted sequence, the reused positions that were loaded for it from lower tiers. Empty if no sequence has
    any."""
    tiers: list[TierReport] = []
    """The lower tiers that have changed since the last grant."""


GRAMMAR_LOST = (
    "The grammar cannot be followed: its process has ended, or cannot be started for lack of memory. "
    "Please try again later."
)
"""The one failure of a row that is not its request's fault."""


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """The result of one pass, by row of its plan. Every row is accounted for, whatever its sequence did meanwhile."""

    step: int
    generation: int
    row_ids: list[int]
    row_starts: list[int]
    row_ends: list[int]
    """Ends of the spans of positions whose KV was written and is kept: the *computed* entries of the accounts. A row
    that continues has advanced by that many positions."""
    token_ids: list[int]
    """Tokens that the rows yielded, in the order of the rows."""
    num_tokens: list[int]
    """Number of tokens per row. Empty: one each."""
    read_ids: list[int]
    """Sequences for which this was the first step of an admission."""
    read_tokens: list[int]
    """Tokens in granted blocks that the executor's own tags confirm: the *read* entry of the accounts."""
    seconds: float
    payloads: StepPayloads | None = None
    """None if no row has any."""
    copied_tokens: list[int] = []
    """Parallel to `read_ids`: tokens after those read whose KV was copied from a block with a confirmed tag, the
    *copied* entry. Empty if there are none."""
    failed_rows: list[int] = []
    """Rows that should have sampled a token but had none left..."""
    failures: list[str] = []
    """...and the reasons. Their sequences end."""
    broken_rows: list[int] = []
    """Rows that should have sampled a token but have NaN or infinite logits. Their sequences end, too."""
    draft_rows: list[int] = []
    """Rows for which draft tokens were verified. The first of these is at the position after the row's start..."""
    draft_ends: list[int] = []
    """...and the last before this one. Those at or after the row's end were rejected: their KV means nothing."""
    predicted_rows: list[int] = []
    """Those of these whose draft is from what the client predicts."""
    drafts_next: bool = True
    """Whether there may be drafts for the next steps. If not, their plans need no room for them."""


@attrs.frozen
class StepFailed:
    """A pass that raised. The executor's record is as it was before the pass."""

    step: int
    generation: int
    error: str
    out_of_memory: bool = False
    """Whether memory ran out. A smaller pass may fit."""


@attrs.frozen
class StepDropped:
    step: int
    generation: int


StepResult = StepDone | StepFailed | StepDropped
