"""What the accountant receives: from the engine one report a step, from the web side the life of each request."""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

from .handler import Outlet
from .outcomes import FinishReason, RequestError
from .prompts import Breakpoint
from .scores import StepScores


class StepReport(msgspec.Struct, array_like=True, frozen=True):
    """One step as the web process hears of it: tokens for the detokenizer, entries for the accountant.

    Array-like, because one is sent every step. Columns of one group are parallel.
    """

    number: int
    """Counted up from 1 in the life of an engine: a report that is lost, or comes twice, shows."""
    step: int
    # what the block manager and the executor book at a sequence's admission
    admitted_ids: list[int]
    admitted_number: list[int]
    """1 at a sequence's first admission, counted up by preemption."""
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
    # sequences that ended by themselves with the token above
    ended_ids: list[int]
    ended_reasons: list[str]
    # one a Submit, after the last step that held the sequence
    terminal_ids: list[int]
    terminal_errors: list[str | None]
    """None: it ended or was aborted; else why it failed."""
    terminal_error_kinds: list[str | None]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preempted: int
    # said by engines that have more to say than this one; empty: nothing special
    admitted_tiers: list[dict[str, int] | None] = []
    """Parallel to `admitted_ids`: reused tokens by tier. None: the engine does not count them. Empty: all `device`."""
    admitted_sides: list[str] = []
    """Parallel to `admitted_ids`: `prefill`, or `decode` where a sequence came with its KV from another engine, which
    is not a hit. Empty: all `prefill`."""
    revised_ids: list[int] = []
    revised_tiers: list[str] = []
    revised_tokens: list[int] = []
    """Granted tokens whose load from a lower tier failed: they are computed, not reused."""
    estimated_ids: list[int] = []
    estimated_tokens: list[int] = []
    """A router's guess at what a sequence's engine reuses, for an engine that says nothing."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Prompt tokens in marked prefixes of each one that are pinned."""
    num_pinned_blocks: int = 0
    """Neither free nor held by a sequence."""
    num_pins_yielded: int = 0
    admitted_copyable: list[int] = []
    """Parallel to `admitted_ids`: tokens after the reused ones that a cached block contains too. Empty: none."""
    admitted_copied: list[int] = []
    """Likewise: those that the executor copied. Nobody's discount."""
    scores: list[StepScores] = []
    """Of each step reported here that has any, in order: every token above of a sequence that asks, and prompts."""


class Side(StrEnum):
    """Which half of a disaggregated pair an admission was on."""

    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen
class Caller:
    """Who sent a request and what they call it: what a bill needs besides numbers. Checked by the web layer."""

    tenant: str = "default"
    key_id: str | None = None
    """Of the API key that it came with; None where none is needed."""
    model: str = ""
    """The name that was asked for."""
    client_request_id: str | None = None
    """An alias for logs and echo, never a key."""
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    """Digest of tenant, idempotency key and body: equal for a retry of the same work only."""


@attrs.frozen
class OpenAccount:
    request_id: str
    endpoint: str
    received_at: float
    """Clock of the process (`trio.current_time`)."""
    outlet: Outlet
    caller: Caller = Caller()
    seed: int | None = None
    """Of its draws, as its record will have it."""


@attrs.frozen
class Prompted:
    """A request's sequences, before the first of them is submitted."""

    request_id: str
    sequence_ids: tuple[int, ...]
    prompt_indexes: tuple[int, ...]
    choice_indexes: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...]
    breakpoints: tuple[tuple[Breakpoint, ...], ...] = ()
    """Those of each sequence's prompt, in order. Empty: nobody marked any."""


@attrs.frozen
class Refused:
    """A request that cannot be served, or not any longer, and why."""

    request_id: str
    error: RequestError


@attrs.frozen
class Completed:
    """The web side's word on one sequence: how many tokens its client was given, and why it stopped."""

    request_id: str
    sequence_id: int
    num_completion_tokens: int
    finish_reason: FinishReason | None
    """None: it was told to forget the sequence before it had stopped."""


@attrs.frozen
class Left:
    """A request's scope has ended. No Submit of it can follow."""

    request_id: str
    submitted_ids: tuple[int, ...]
    """Those of its sequences that an engine was given: the account waits for their Terminals."""


@attrs.frozen
class EngineDied:
    incarnation: int
    reason: str
    held_ids: tuple[int, ...]
    """Sequences that it had been given and had not answered, as far as reports were read when it died."""
