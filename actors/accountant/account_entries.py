"""The entries that make up a request's account: one small class for each kind of thing that a step report can say.

The accountant writes them (`report_writer.py`), the entry store keeps them, and an `Account` applies them. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs

from ..messages.accountant import Side
from ..messages.block_manager import CacheMiss
from ..messages.tiers import Tier, TierSpans, num_positions
from .coverage import Coverage

MAX_DRAFT_TOKENS = 64
"""More than an engine verifies for one sequence in a step."""


@attrs.frozen(kw_only=True)
class Admission:
    """One admission of one sequence, as the engine reported it with the admission's first step."""

    number: int
    """1 for a sequence's first admission on its side of an engine; each preemption adds one."""
    side: Side = Side.PREFILL
    reused: int | None
    """Tokens that the block manager granted from its cache. None: the engine does not count them."""
    tiers: Mapping[str, int] | None = None
    """`reused` by tier. None: all of it was on the device. What it says of `peer` came from another engine: no hit."""
    tier_spans: TierSpans = attrs.field(factory=dict)
    """Where those from lower tiers and from another engine are. Empty: there are none, or the engine does not say
    where."""
    read: int
    """Tokens whose cached KV the executor confirms it used."""
    copyable: int = 0
    """Tokens after the reused ones for which the block manager named a block to copy from. Never billed as cached."""
    copied: int = 0
    """How many of those the executor copied instead of computing them."""
    miss: CacheMiss | None
    engine_id: int | None = None
    incarnation: int | None
    at: float
    """When its step began, if that is known."""

    def moved(self, up_to: int) -> Coverage:
        """Return the positions before `up_to` that came from another engine."""
        spans = self.tier_spans.get(Tier.PEER) or [0, (self.tiers or {}).get(Tier.PEER, 0)]
        moved = Coverage()
        for start, end in zip(spans[::2], spans[1::2], strict=False):
            moved.add(max(0, start), min(end, up_to))
        return moved

    @property
    def num_said_moved(self) -> int:
        """How many tokens the engine says came from another one."""
        spans = num_positions(self.tier_spans.get(Tier.PEER, []))
        return max(spans, (self.tiers or {}).get(Tier.PEER, 0))


@attrs.define
class Span:
    """Positions [start, end) whose KV a step wrote. Extended in place while the next step continues at `end`."""

    start: int
    end: int


@attrs.frozen
class Written:
    """Prompt positions [start, end) in blocks that this sequence was the first to commit."""

    start: int
    end: int


@attrs.frozen
class Pinned:
    """Marked prefixes of this sequence's prompt are pinned; the longest has `num_tokens` tokens."""

    num_tokens: int


@attrs.frozen
class Revision:
    """Granted tokens that could not be loaded from their tier: they are computed, not reused."""

    tier: str
    num_tokens: int


@attrs.frozen
class Estimation:
    """The router's estimate of what its chosen engine reuses."""

    num_tokens: int


@attrs.frozen
class FirstToken:
    """The sequence's first token is on its way to the client."""

    at: float


@attrs.frozen
class EngineLost:
    """The engine that held the sequence has died, and the next one resumes it."""

    incarnation: int


@attrs.frozen
class HandedOver:
    """The engine that held the sequence has ended it for another one to resume."""


@attrs.frozen
class Ended:
    """The engine reports nothing more about the sequence."""


@attrs.frozen
class Gap:
    """A step report was lost. It may have concerned the sequence, and may have contained its end."""


class PredictedDraft(NamedTuple):
    """A draft from what the client predicts: tokens at [start, end), of which those at [start, kept) were right."""

    start: int
    kept: int
    end: int


@attrs.frozen
class OfPrediction:
    """Tokens from what a client predicts, as it is told of them."""

    accepted: int
    rejected: int


@attrs.define
class Drafted:
    """The draft tokens of a sequence that steps have verified. Extended in place."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted_at: list[int] = attrs.field(factory=list)
    """How often the first token of a draft was accepted, the second, and so on."""
    predicted: list[PredictedDraft] = attrs.field(factory=list)
    """Those from what the client predicts, ascending."""
    is_impossible: bool = False
    """More was accepted than drafted."""

    def add(self, start: int, kept: int, end: int, *, is_predicted: bool) -> None:
        """Add a draft with tokens at [start, end), of which those at [start, kept) were accepted."""
        num_tokens, num_accepted = end - start, kept - start
        self.is_impossible |= not 0 <= num_accepted <= num_tokens
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.accepted_at += [0] * (min(num_accepted, MAX_DRAFT_TOKENS) - len(self.accepted_at))
        for at in range(min(num_accepted, MAX_DRAFT_TOKENS)):
            self.accepted_at[at] += 1
        while self.predicted and self.predicted[-1].start >= start:
            self.predicted.pop()  # of a step whose tokens were void, since the sequence was preempted
        if is_predicted:
            self.predicted.append(PredictedDraft(start, kept, end))

    def of_prediction(self, end: int) -> OfPrediction:
        """Return how many tokens from a prediction are part of an answer that ends at a position, and how many are not.

        An engine goes on until it hears of a complete stop string, or of a client that has left. Drafts behind the end
        are in neither number.
        """
        drafts = [draft for draft in self.predicted if draft.start < end]
        accepted = sum(max(0, min(draft.kept, end) - draft.start) for draft in drafts)
        return OfPrediction(accepted, sum(draft.end - draft.start for draft in drafts) - accepted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


Entry = Admission | Span | Written | Pinned | Revision | Estimation | FirstToken | EngineLost | HandedOver | Ended | Gap
