"""Explains a request from its account: what of each prompt was reused, copied or computed, and why no more was reused.

Used by the explanation store. Pure. What must always hold: every number is the account's or the record's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from ..messages.block_manager import CacheMiss, MissReason
from ..messages.counts import Known, billable
from ..messages.explanations import (
    Advice,
    AdviceCode,
    BlockSource,
    BlockSpan,
    EvictedBlock,
    ExplainedPrompt,
    Explanation,
    NamedRequest,
    PromptEnd,
    PromptNotes,
    PromptOutline,
)
from ..messages.tiers import Tier
from ..messages.usage_record import UsageRecord
from .account import Account
from .account_entries import Admission, Entry, Span
from .prompt_account import PromptAccount
from .request_entries import RequestEntries
from .sequence_account import SequenceAccount

NameOf = Callable[[int], NamedRequest | None]
"""Returns whose a sequence is or was, if that is still known."""
_TIERS = frozenset(Tier)


def explanation_of(record: UsageRecord, prompts: Iterable[ExplainedPrompt], *, is_open: bool) -> Explanation:
    """Return the explanation with a record's totals."""
    return Explanation(
        request_id=record.request_id,
        tenant=record.tenant,
        is_open=is_open,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        restored_tokens=record.restored_tokens,
        recomputed_tokens=record.recomputed_tokens,
        prompts=tuple(prompts),
        cached_by_tier=record.cached_by_tier,
        has_reasoning=record.reasoning_tokens > 0,
        model=record.model,
        adapter=record.adapter,
        parent=record.parent,
    )


def explain_request(
    request: RequestEntries,
    account: Account,
    record: UsageRecord,
    name_of: NameOf,
    num_usable_blocks: int,
    *,
    is_open: bool,
) -> Explanation:
    """Explain a request from its account and record. `num_usable_blocks` is the size of its engine's cache."""
    if account.upstream is not None:
        return attrs.evolve(explain_record(record), is_open=is_open)
    prompts = explain_prompts(request, account, name_of, num_usable_blocks)
    return explanation_of(record, prompts, is_open=is_open)


def explain_record(record: UsageRecord) -> Explanation:
    """Explain a request from its record alone: without blocks, and of several prompts without their own numbers."""
    misses = record.cache_misses
    if len(misses) > 1:
        prompts = [ExplainedPrompt(None, None, None, None, ended=PromptEnd(miss)) for miss in misses]
    elif record.prompt_tokens is None:
        prompts = []
    else:
        ended = PromptEnd(misses[0]) if misses else None
        numbers = (record.prompt_tokens, record.cached_tokens, record.restored_tokens, record.recomputed_tokens)
        prompts = [ExplainedPrompt(*numbers, cached_by_tier=record.cached_by_tier, ended=ended)]
    return explanation_of(record, prompts, is_open=False)


def explain_prompts(
    request: RequestEntries, account: Account, name_of: NameOf, num_usable_blocks: int
) -> Iterator[ExplainedPrompt]:
    """Explain the prompts of a request, in order."""
    unix_offset_s = request.opened_unix_s - request.opened.received_at
    sequences: dict[int, list[SequenceAccount]] = {}
    for sequence in account.sequences.values():
        sequences.setdefault(sequence.prompt_index, []).append(sequence)
    notes = () if request.prompted is None else request.prompted.notes
    for index, prompt in account.prompts.items():
        own = sequences[index]
        entries = next((request.entries[s.sequence_id] for s in own if s.choice_index == 0), [])
        noted = notes[index] if index < len(notes) else PromptNotes()
        ended = _end_of(prompt, name_of, unix_offset_s)
        yield ExplainedPrompt(
            prompt_tokens=prompt.num_prompt_tokens,
            cached_tokens=billable(prompt.cached) if prompt.is_admitted else None,
            restored_tokens=sum(sequence.restored_first for sequence in own),
            recomputed_tokens=sum(sequence.recomputed for sequence in own),
            cached_by_tier=prompt.by_tier if prompt.is_admitted and isinstance(prompt.cached, Known) else None,
            blocks=block_spans(entries, prompt.num_prompt_tokens),
            outline=noted.outline,
            ended=ended,
            advice=(*noted.advice, *_about_pool(ended, noted.outline, num_usable_blocks)),
        )


def block_spans(entries: Sequence[Entry], num_prompt_tokens: int) -> tuple[BlockSpan, ...]:
    """Return where each prompt position was covered first, in ascending order, neighbours of one source joined."""
    spans: list[BlockSpan] = []
    covered = 0

    def cover(start: int, end: int, source: BlockSource, tier: Tier | None = None) -> None:
        nonlocal covered
        start, end = max(start, covered), min(end, num_prompt_tokens)
        if start >= end:
            return
        covered = end
        if spans and (spans[-1].source, spans[-1].tier, spans[-1].end) == (source, tier, start):
            start = spans.pop().start
        spans.append(BlockSpan(start, end, source, tier))

    for entry in entries:
        if type(entry) is Admission:
            for end, tier in _reused_runs(entry):
                is_moved = tier is Tier.PEER
                cover(covered, end, BlockSource.MOVED if is_moved else BlockSource.REUSED, None if is_moved else tier)
            cover(entry.read, entry.read + entry.copied, BlockSource.COPIED)
        elif type(entry) is Span:
            cover(entry.start, entry.end, BlockSource.COMPUTED)
    return tuple(spans)


def _reused_runs(admission: Admission) -> Iterator[tuple[int, Tier | None]]:
    """Yield where each run of reused positions ends, in order, and its tier; None where the engine does not say."""
    if admission.reused is None:
        yield admission.read, None
        return
    tiers = {tier: num for tier, num in (admission.tiers or {}).items() if num}
    spans = admission.tier_spans
    located = {tier: sum(ends[1::2]) - sum(ends[::2]) for tier, ends in spans.items() if ends}
    lower = {tier: num for tier, num in tiers.items() if tier != Tier.DEVICE}
    if lower != located or not lower.keys() <= _TIERS:
        only = next(iter(tiers)) if len(tiers) == 1 else None
        yield admission.read, Tier(only) if only in _TIERS else None
        return
    for start, end, tier in sorted(
        (start, end, Tier(tier))
        for tier, ends in spans.items()
        for start, end in zip(ends[::2], ends[1::2], strict=True)
    ):
        yield min(start, admission.read), Tier.DEVICE
        yield min(end, admission.read), tier
    yield admission.read, Tier.DEVICE


def _end_of(prompt: PromptAccount, name_of: NameOf, unix_offset_s: float) -> PromptEnd | None:
    admission, miss = prompt.admission, prompt.miss
    if admission is None or miss is None or not prompt.is_admitted:
        return None
    detail, bare = miss.detail, CacheMiss(miss.reason, miss.token)
    if detail is None:
        return PromptEnd(bare)
    name = name_of(detail.sequence_id)
    if miss.reason is not MissReason.EVICTED:
        return PromptEnd(bare, diverged_from=None if name is None else name.request_id)
    at = admission.at + unix_offset_s - (detail.evicted_ago_s or 0.0)
    return PromptEnd(miss, evicted=EvictedBlock(at, name, detail.idle_s))


def _about_pool(ended: PromptEnd | None, outline: PromptOutline, num_usable_blocks: int) -> tuple[Advice, ...]:
    """Advise a larger cache if more free blocks would have kept the next block."""
    if ended is None or ended.miss.reason is not MissReason.EVICTED or ended.miss.detail is None:
        return ()
    needed = num_usable_blocks + ended.miss.detail.num_evicted_since
    part = outline.part_at(ended.miss.token)
    return (Advice(AdviceCode.POOL_TOO_SMALL, None if part is None else part.message, ended.miss.token, needed),)
