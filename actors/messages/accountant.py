"""What the accountant receives: one report per step from the engine, and the events of each request."""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

from quipu.kernels.step_types import SequenceKind

from .block_manager import MissDetail
from .explanations import PromptNotes
from .handler import KeepAnswer, Outlet
from .outcomes import Fault, FinishReason, RequestError
from .prompts import Breakpoint
from .scores import StepPayloads
from .tiers import TierReport, TierSpans
from .upstream import UpstreamUsage


class StepReport(msgspec.Struct, array_like=True, frozen=True):
    """What the engine reports of a step: tokens for the detokenizer, entries for the accountant.

    Array-like, because one is sent every step. The columns of a group are parallel.
    """

    number: int
    """Counted up from 1 by each engine, so that lost and repeated reports are detected."""
    step: int
    # what the block manager and the executor report at a sequence's admission
    admitted_ids: list[int]
    admitted_number: list[int]
    """1 for a sequence's first admission; each preemption adds one."""
    admitted_reused: list[int]
    admitted_read: list[int]
    admitted_miss_reasons: list[str]
    admitted_miss_tokens: list[int]
    # spans of positions whose KV this step wrote
    span_ids: list[int]
    span_starts: list[int]
    span_ends: list[int]
    # prompt positions in blocks that a sequence was the first to commit
    written_ids: list[int]
    written_starts: list[int]
    written_ends: list[int]
    # tokens for the client, in order
    token_sequence_ids: list[int]
    token_ids: list[int]
    # sequences that ended by themselves, with their last token above unless they have none
    ended_ids: list[int]
    ended_reasons: list[str]
    # one for each Submit, after the last step that included the sequence
    terminal_ids: list[int]
    terminal_errors: list[str | None]
    """Why it failed. None: it ended or was aborted."""
    terminal_error_kinds: list[str | None]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preempted: int
    # reported by engines with tiers or with separate prefill and decode sides, else empty
    admitted_tiers: list[dict[str, int] | None] = []
    """Parallel to `admitted_ids`: reused tokens by tier. None: the engine does not count them. Empty: all `device`."""
    admitted_sides: list[str] = []
    """Parallel to `admitted_ids`: `prefill`, or `decode` for a sequence whose KV came from another engine (not a cache
    hit). Empty: all `prefill`."""
    revised_ids: list[int] = []
    revised_tiers: list[str] = []
    revised_tokens: list[int] = []
    """Tokens that were reported as reused and then could not be loaded from a lower tier: they are computed. An engine
    that reports an admission only when its loads are done, as this project's does, has none."""
    estimated_ids: list[int] = []
    estimated_tokens: list[int] = []
    """A router's estimate of what an engine reuses that does not report it."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Number of prompt tokens in each sequence's longest pinned prefix."""
    num_pinned_blocks: int = 0
    """Blocks that are neither free nor held by a sequence."""
    num_pins_yielded: int = 0
    admitted_copyable: list[int] = []
    """Parallel to `admitted_ids`: tokens after the reused ones that a cached block contains too. Empty: none."""
    admitted_copied: list[int] = []
    """How many of these the executor copied. Never billed as cached."""
    payloads: list[StepPayloads] = []
    """Scores of the tokens above, and of prompts, for sequences that ask for them; one item per step that has any."""
    stored_keys: bytes = b""
    """The first 8 bytes of the key of each block added to the engine's cache since the last report..."""
    removed_keys: bytes = b""
    """...and of each key evicted since then; disjoint from `stored_keys`."""
    is_cleared: bool = False
    """The cache was emptied before these were stored."""
    filled_ids: list[int] = []
    """Sequences that have filled a block while decoding, once for each block..."""
    filled_keys: bytes = b""
    """...and its key."""
    admitted_miss_details: list[MissDetail | None] = []
    """Parallel to `admitted_ids`: what the misses go back to. Empty: nothing is known of any."""
    admitted_step_s: list[float] = []
    """Parallel to `admitted_ids`: how long the step that admitted each took. Empty: not known."""
    admitted_tier_spans: list[TierSpans] = []
    """Parallel to `admitted_ids`: the positions whose KV was loaded from lower tiers. Their numbers are those in
    `admitted_tiers`. Empty: none of any."""
    lowered_keys: dict[str, bytes] = {}
    """By tier, the first 8 bytes of each key of which it is the fastest tier since this report, and was not before.
    Never `device`..."""
    raised_keys: bytes = b""
    """...and of each that lies on the device again. `stored_keys` and `removed_keys` are about all tiers together: a
    block that is evicted from the device and is in another tier is not among those removed."""
    shared_keys: bytes = b""
    """The first 8 bytes of the key of each block that the engine has found or stored in the object store since the last
    report; the object store is none of its own tiers, of which the columns above tell..."""
    unshared_keys: bytes = b""
    """...and of each that turned out not to be there."""
    draft_ids: list[int] = []
    """Sequences of which a step has verified draft tokens, at the positions from..."""
    draft_starts: list[int] = []
    draft_kept: list[int] = []
    """...to this one if they were accepted..."""
    draft_ends: list[int] = []
    """...and from there to this one if they were rejected: work that covers nothing."""
    draft_predicted: list[bool] = []
    """Whether the draft is from what the client predicts."""
    tiers: list[TierReport] = []
    """The lower tiers that have changed since the last report."""
    engine_id: int = 0
    """Set when the report is received, as is..."""
    incarnation: int = 0
    """...the engine's incarnation."""


class Side(StrEnum):
    """The half of a disaggregated pair (prefill, decode) that an admission was on."""

    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen
class Caller:
    """Who sent a request and how they identify it. Validated by the web layer."""

    tenant: str = "default"
    key_id: str | None = None
    """Id of the request's API key. None: the server has no keys."""
    model: str = ""
    adapter: str | None = None
    """Digest of the adapter that `model` names. None: it names a model."""
    parent: str | None = None
    """The model that this adapter changes."""
    client_request_id: str | None = None
    """The client's own id, logged and echoed; never used as a key."""
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    """Digest of tenant, idempotency key and body: equal only for a retry of the same request."""
    batch_id: str | None = None
    """The batch of which it is a line. None: a client waits for it."""


@attrs.frozen
class OpenAccount:
    """A request was opened."""

    request_id: str
    endpoint: str
    received_at: float
    """On the process's clock (`trio.current_time`)."""
    outlet: Outlet
    caller: Caller = Caller()
    seed: int | None = None
    """The sampling seed, as its record will show it."""
    kind: SequenceKind = SequenceKind.GENERATE
    keep: KeepAnswer | None = None
    """Keeps the answer before the record is written, for answers that are not sent to a client who waits."""


@attrs.frozen
class Prompted:
    """A request's sequences, sent before the first of them is submitted."""

    request_id: str
    sequence_ids: tuple[int, ...]
    prompt_indexes: tuple[int, ...]
    choice_indexes: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...]
    breakpoints: tuple[tuple[Breakpoint, ...], ...] = ()
    """The cache breakpoints of each sequence's prompt, in order. Empty: there are none."""
    block_keys: tuple[list[bytes], ...] = ()
    """The keys of each prompt's blocks, by the prompt's index."""
    notes: tuple[PromptNotes, ...] = ()
    """By prompt. Empty: nothing was noted."""


@attrs.frozen
class Refused:
    """A request cannot be served, or no longer."""

    request_id: str
    error: RequestError
    fault: Fault | None = None


@attrs.frozen
class Completed:
    """A sequence is complete: how many tokens its client was given, and why it stopped."""

    request_id: str
    sequence_id: int
    num_completion_tokens: int
    finish_reason: FinishReason | None
    """None: the detokenizer was told to forget the sequence before it had stopped."""
    num_reasoning_tokens: int = 0
    """How many of them are reasoning, its delimiters included."""


@attrs.frozen
class Left:
    """A request's scope has ended. None of its sequences can be submitted after this."""

    request_id: str
    submitted_ids: tuple[int, ...]
    """Its submitted sequences: the account stays open until their Terminals."""


@attrs.frozen
class EngineDied:
    incarnation: int
    reason: str
    held_ids: tuple[int, ...]
    """Sequences that it held, according to the reports read before it died."""
    step_ids: tuple[int, ...] | None = None
    """Those of the step that it was running, if that is known."""
    is_last: bool = False
    """There will be no other engine."""
    engine_id: int = 0


@attrs.frozen
class Routed:
    """The router has sent a sequence to one of several engines."""

    sequence_id: int
    engine_id: int
    num_overlapping: int
    """Estimate: prompt tokens that the engine will find in its cache."""


@attrs.frozen
class Unsent:
    """A sequence was aborted before an engine could be given it: it has no Terminal."""

    sequence_id: int


@attrs.frozen
class Forwarded:
    """A request was sent to an upstream; after a failure that its client does not see, to another one."""

    request_id: str
    engine_id: int
    incarnation: int
    estimate: int | None
    """The cached tokens that the router expects. None: it cannot tell."""


@attrs.frozen
class Answering:
    """An upstream has begun to answer a request."""

    request_id: str


@attrs.frozen
class Answered:
    """Nothing more comes from the upstream of a request."""

    request_id: str
    usage: UpstreamUsage
    finish_reason: FinishReason | None
    num_choices: int
    is_complete: bool
    """Its response has its end."""
