"""Explanations: an account's numbers, where each position came from, and how many requests' explanations are kept."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest

from quipu.actors.accountant.account_entries import Admission, Entry, Span
from quipu.actors.accountant.explaining import block_spans, explain_record
from quipu.actors.cache_insight.explanation_store import ExplanationStore
from quipu.actors.messages.accountant import Prompted
from quipu.actors.messages.block_manager import CacheMiss, MissDetail, MissReason
from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.explanations import (
    Advice,
    AdviceCode,
    BlockSource,
    BlockSpan,
    EvictedBlock,
    ExplainedPrompt,
    Explanation,
    NamedRequest,
    PromptEnd,
    PromptOutline,
)
from quipu.actors.messages.prompts import PartSpan
from quipu.actors.messages.tiers import Tier
from tests.actors.accountant.accounts import admission
from tests.actors.ledger.ledgers import record_of

REUSED, COPIED, COMPUTED = BlockSource.REUSED, BlockSource.COPIED, BlockSource.COMPUTED


def tiered(read: int, tiers: dict[str, int], **spans: list[int]) -> Admission:
    """Return an admission that read so many positions, and how many of them from each tier."""
    return admission(1, sum(tiers.values()), read, tiers=tiers, tier_spans=spans)


@pytest.mark.parametrize(
    ("entries", "spans"),
    [
        ([], []),
        ([admission(1, 0, 0), Span(0, 20), Span(20, 45)], [(0, 40, COMPUTED)]),
        ([admission(1, 16, 16), Span(16, 40)], [(0, 16, REUSED, Tier.DEVICE), (16, 40, COMPUTED)]),
        (
            [admission(1, 16, 16, copyable=15, copied=10), Span(26, 41)],
            [(0, 16, REUSED, Tier.DEVICE), (16, 26, COPIED), (26, 40, COMPUTED)],
        ),
        # preempted after 8 computed positions, then found more cached than it had computed
        (
            [admission(1, 16, 16), Span(16, 24), admission(2, 32, 32), Span(32, 50)],
            [(0, 16, REUSED, Tier.DEVICE), (16, 24, COMPUTED), (24, 32, REUSED, Tier.DEVICE), (32, 40, COMPUTED)],
        ),
        # a load from the host between two blocks of the device, and one of a prompt that is all on the host
        (
            [tiered(32, {"device": 16, "host": 16}, host=[8, 24]), Span(32, 40)],
            [
                (0, 8, REUSED, Tier.DEVICE),
                (8, 24, REUSED, Tier.HOST),
                (24, 32, REUSED, Tier.DEVICE),
                (32, 40, COMPUTED),
            ],
        ),
        ([tiered(32, {"host": 32}, host=[0, 32]), Span(32, 40)], [(0, 32, REUSED, Tier.HOST), (32, 40, COMPUTED)]),
        # each tier brought some, in any order
        (
            [tiered(32, {"device": 8, "disk": 16, "remote": 8}, remote=[24, 32], disk=[0, 8, 16, 24]), Span(32, 40)],
            [
                (0, 8, REUSED, Tier.DISK),
                (8, 16, REUSED, Tier.DEVICE),
                (16, 24, REUSED, Tier.DISK),
                (24, 32, REUSED, Tier.REMOTE),
                (32, 40, COMPUTED),
            ],
        ),
        # spans that are not those of the tiers say nothing
        ([tiered(32, {"device": 16, "disk": 16}, remote=[0, 16]), Span(32, 40)], [(0, 32, REUSED), (32, 40, COMPUTED)]),
        # tiers without spans: no tier is given unless there is only one
        ([tiered(32, {"device": 16, "host": 16}), Span(32, 40)], [(0, 32, REUSED), (32, 40, COMPUTED)]),
        ([tiered(32, {"device": 32}), Span(32, 40)], [(0, 32, REUSED, Tier.DEVICE), (32, 40, COMPUTED)]),
        ([tiered(32, {"disk": 32}), Span(32, 40)], [(0, 32, REUSED, Tier.DISK), (32, 40, COMPUTED)]),
        # fewer positions were read than the spans say
        (
            [tiered(16, {"device": 8, "host": 16}, host=[8, 24]), Span(16, 40)],
            [(0, 8, REUSED, Tier.DEVICE), (8, 16, REUSED, Tier.HOST), (16, 40, COMPUTED)],
        ),
        # computed again after an engine died: what was covered first counts
        ([admission(1, 0, 0), Span(0, 30), admission(1, 0, 0), Span(0, 40)], [(0, 40, COMPUTED)]),
    ],
)
def test_positions_have_the_source_that_covered_them_first(entries: list[Entry], spans: list[tuple[Any, ...]]) -> None:
    """Of a prompt of 40 tokens, every covered position is in one span; output positions are in none."""
    assert block_spans(entries, 40) == tuple(BlockSpan(*span) for span in spans)


def explanation(name: str, num_prompts: int = 1, **fields: Any) -> Explanation:
    prompt = ExplainedPrompt(40, 16, 0, 0, (BlockSpan(0, 40, COMPUTED),))
    return Explanation(name, "acme", False, 40, 16, 0, 0, (prompt,) * num_prompts, **fields)


def test_last_requests_are_kept() -> None:
    """The oldest explanations are dropped first; one that is kept again, after a crash, is there once."""
    store = ExplanationStore(max_requests=2)
    for name in ("a", "b", "b", "c"):
        store.keep(explanation(name))
    assert [store.find(name, None) is not None for name in "abc"] == [False, True, True]
    assert len(store) == 2


def test_kept_explanation_is_found_unchanged() -> None:
    """Packing loses nothing, neither unknown numbers nor fields that only some prompts have."""
    parts = [PartSpan(None, None, "system", 0, 4), PartSpan(0, 1, "user", 4, 70_000)]
    miss = CacheMiss(MissReason.EVICTED, 16, MissDetail(7, 1.5, None, 3))
    evicted = PromptEnd(miss, evicted=EvictedBlock(1e9, NamedRequest("b", "acme"), None))
    advice = (Advice(AdviceCode.POOL_TOO_SMALL, 0, 16, 40), Advice(AdviceCode.TOOLS_REORDERED, None))
    full = ExplainedPrompt(
        70_000,
        16,
        1,
        2,
        (BlockSpan(0, 16, REUSED), BlockSpan(16, 30, COPIED)),
        PromptOutline.of(parts),
        evicted,
        advice,
    )
    other = ExplainedPrompt(None, None, None, None, ended=PromptEnd(CacheMiss(MissReason.DIVERGED, 3), "a"))
    kept = Explanation("r", "acme", False, None, 16, 1, 2, (full, other), has_reasoning=True)
    store = ExplanationStore()
    store.keep(kept)
    assert store.find("r", "acme") == kept and store.had_reasoning("r")
    assert [store.prompt("r", index) for index in range(3)] == [full, other, None]
    assert list(full.outline) == parts


def test_the_garbage_collector_does_not_walk_what_is_kept() -> None:
    """Neither explanations nor names of sequences are tracked by the collector, which would block the event loop."""
    store = ExplanationStore()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1000):
        store.keep(explanation(f"r{number}", num_prompts=2))
        store.name_sequences(Prompted(f"r{number}", (2 * number, 2 * number + 1), (0, 0), (0, 1), (40, 40)), "acme")
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert len(store) == 1000 and store.name_of(1999) == NamedRequest("r999", "acme")


def test_size_of_all_is_bounded() -> None:
    """Explanations of many prompts displace more of the others, and one larger than the limit is not kept."""
    store = ExplanationStore(max_requests=1000, max_bytes=100_000)
    for number in range(100):
        store.keep(explanation(f"r{number}", num_prompts=10))
        assert 0 < store.num_bytes <= 100_000
    assert store.find("r0", None) is None and store.find("r99", None) is not None
    store.keep(explanation("huge", num_prompts=1000))
    assert len(store) == store.num_bytes == 0


def test_nothing_is_kept_at_zero() -> None:
    """`--explain-requests 0` keeps neither explanations nor names."""
    store = ExplanationStore(max_requests=0)
    store.keep(explanation("a"))
    store.name_sequences(Prompted("a", (1, 2), (0, 0), (0, 1), (40, 40)), "acme")
    assert store.find("a", None) is None and store.name_of(1) is None


def test_only_its_tenant_finds_a_request() -> None:
    """A request is found by its own tenant, and by a caller who may see all tenants."""
    store = ExplanationStore()
    store.keep(explanation("a"))
    assert [store.find("a", tenant) is not None for tenant in ("acme", "b", None)] == [True, False, True]


def test_names_of_sequences() -> None:
    """A sequence's id leads to the name of its request, even if requests are announced out of order, until there are
    too many."""
    store = ExplanationStore(max_requests=3)
    ids = ((1, 2, 3), (7,), (4, 5, 6))
    for name, sequence_ids in zip("acb", ids, strict=True):
        zeros = (0,) * len(sequence_ids)
        store.name_sequences(Prompted(name, sequence_ids, zeros, zeros, zeros), f"tenant of {name}")
    names = [store.name_of(sequence_id) for sequence_id in range(9)]
    assert [name and name.request_id for name in names] == [None, *"aaabbbc", None]
    assert names[1] == NamedRequest("a", "tenant of a")
    for number in range(8, 20):
        store.name_sequences(Prompted(f"r{number}", (number,), (0,), (0,), (0,)), "t")
    assert store.name_of(1) is None and store.name_of(19) == NamedRequest("r19", "t")


def test_record_of_one_prompt() -> None:
    """Numbers and the reason are those of the record, which has neither blocks nor messages."""
    record = record_of("r1", cache_misses=(CacheMiss(MissReason.EVICTED, 48),), restored_tokens=3, recomputed_tokens=7)
    explained = explain_record(record)
    (prompt,) = explained.prompts
    assert (prompt.prompt_tokens, prompt.cached_tokens) == (record.prompt_tokens, record.cached_tokens)
    assert (prompt.restored_tokens, prompt.recomputed_tokens) == (3, 7)
    assert prompt.ended is not None and prompt.ended.miss == CacheMiss(MissReason.EVICTED, 48)
    assert not prompt.blocks and len(prompt.outline) == 0 and not explained.is_open


def test_record_of_several_prompts() -> None:
    """A record has only sums over several prompts: these are shown, and the numbers of each prompt are unknown."""
    misses = (CacheMiss(MissReason.NONE, 48), CacheMiss(MissReason.DIVERGED, 5))
    explained = explain_record(record_of("r1", cache_misses=misses, prompt=Known(100), cached=Known(48)))
    assert (explained.prompt_tokens, explained.cached_tokens) == (100, 48)
    assert [prompt.prompt_tokens for prompt in explained.prompts] == [None, None]
    assert [prompt.ended and prompt.ended.miss for prompt in explained.prompts] == list(misses)


def test_record_without_admission() -> None:
    """The explanation of a request that was never admitted has no prompts and no numbers."""
    record = attrs.evolve(record_of("r1"), prompt=UNKNOWN, cached=UNKNOWN, cache_misses=())
    explained = explain_record(record)
    assert explained.prompts == () and explained.prompt_tokens is None
