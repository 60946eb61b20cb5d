"""Rules about explanations: where each prompt's KV came from, and why no more of it was found in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.arrival import BLOCK, Arrival
from tests.simulation.evidence import Evidence, Record, common, is_afterwards
from tests.simulation.judged_time import PROMPTLY_S
from tests.simulation.seen import Explained, Watched

OF_LOADS = frozenset({"cheaper_to_compute", "load_failed"})
"""Reasons that only servers have whose blocks are also elsewhere than on the device."""
MISSES = frozenset({"evicted", "other_domain", "diverged"}) | OF_LOADS
EPSILON_S = 1e-6


def prompts_are_explained(evidence: Evidence) -> Iterator[str]:
    """Spans of a prompt follow each other and add up to its numbers; its cached prefix ends for a reason."""
    for arrival, watched, record in evidence.recorded():
        explained = evidence.seen.explained.get(arrival.number)
        if explained is None:
            if evidence.is_quiet and record.get("prompt_tokens") is not None:
                yield f"{arrival.request_id} is not explained"
            continue
        if len(explained) != len(arrival.parts):
            continue  # it was cut before all its prompts were admitted
        for part, prompt in zip(arrival.parts, explained, strict=True):
            yield from _spans_add_up(evidence, part, prompt, is_whole=watched.has_finished)
            if prompt.reason is not None and prompt.cached_tokens is not None:
                yield from _has_a_reason(evidence, part, prompt)
                if prompt.reason == "evicted":
                    yield from _was_evicted(evidence, arrival, watched, record, prompt)
        wanted = [f"{prompt.reason}@{prompt.token}" for prompt in explained if prompt.reason is not None]
        if record.get("cache_misses", "").split() != wanted:
            yield f"{arrival.request_id} has the misses {record.get('cache_misses')!r}, explained as {wanted}"


def _spans_add_up(evidence: Evidence, part: Arrival, prompt: Explained, *, is_whole: bool) -> Iterator[str]:
    name, size = part.request_id, len(part.prompt)
    ends = [0, *(end for _, end, _, _ in prompt.spans)]
    follow = zip(ends, prompt.spans, strict=False)
    if any(start != before or not start < end <= size for before, (start, end, _, _) in follow):
        yield f"{name} has the spans {prompt.spans} of {size} tokens"
    if not prompt.spans or prompt.cached_tokens is None:
        return
    if is_whole and ends[-1] != size:
        yield f"{name} has spans of {ends[-1]} of {size} tokens"
    if evidence.keeps_cache and not evidence.metric("num_preemptions_total"):
        reused = sum(end - start for start, end, source, _ in prompt.spans if source == "reused")
        if reused != prompt.cached_tokens:
            yield f"{name} has {prompt.cached_tokens} cached tokens, and spans of {reused}"


def _has_a_reason(evidence: Evidence, part: Arrival, prompt: Explained) -> Iterator[str]:
    name, cached, reason, token = part.request_id, prompt.cached_tokens or 0, prompt.reason, prompt.token
    most = (len(part.prompt) - 1) // BLOCK * BLOCK
    only: str | None = None
    if not evidence.engine["enable_prefix_caching"]:
        only = "disabled"
    elif not part.reads_cache:
        only = "needs_prompt_logprobs"
    elif not most:
        only = "shorter_than_a_block"
    elif cached == most:
        only = "none"
    if (only is not None and reason != only) or (only is None and reason not in MISSES):
        yield f"{name} has {cached} of {most} tokens cached, for the reason {reason}"
        return
    if token is None or not cached <= token <= cached + BLOCK:
        yield f"{name} has {cached} tokens cached, and misses token {token}"
        return
    setup = evidence.seen.plan.setup
    if reason in OF_LOADS and not (setup.tiers or evidence.engine.get("has_peers")):
        yield f"{name} missed blocks for the reason {reason}, and there is only one place for them"
    others = [other for other, _ in evidence.requests() if other.number != part.number]
    if reason == "other_domain" and not evidence.seen.num_engine_deaths:
        strangers = [other for other in others if evidence.domain(other) != evidence.domain(part)]
        if cached or not any(_begin_alike(part, ids) for other in strangers for ids in evidence.computed(other)):
            yield f"{name} has {cached} tokens cached, and is said to have others' prompt"
    if reason == "diverged" and token < (least := _shared_at_least(evidence, part)):
        yield f"{name} is said to diverge at token {token}, and has {least} in common with what is there"
    if prompt.diverged_from is None:
        return
    same = [other for other in evidence.seen.plan.all_arrivals if other.request_id == prompt.diverged_from]
    if not same or evidence.domain(same[0]) != evidence.domain(part):
        yield f"{name} is said to diverge from {prompt.diverged_from}, of another domain"
    elif not evidence.engine.get("has_peers"):
        places = {min(common(part.prompt, ids), cached + BLOCK) for ids in evidence.computed(same[0])}
        if token not in places:
            yield f"{name} is said to diverge at token {token} from {prompt.diverged_from}, and does at {places}"


def _shared_at_least(evidence: Evidence, part: Arrival) -> int:
    """Return how many tokens a prompt has in common with what an engine that is alone must still have.

    That is everything that is asked afterwards, one by one, as long as it has room for all of that.
    """
    if not is_afterwards(part) or len(evidence.seen.engines_left) != 1:
        return 0
    watched, shared, num_blocks = evidence.seen.watched[part.number], 0, len(part.prompt) // BLOCK + 1
    for other, others in evidence.requests():
        if not is_afterwards(other) or others.ended_at + PROMPTLY_S / 4 > watched.opened_at:
            continue
        num_blocks += sum(len(ids) // BLOCK + 1 for ids in evidence.computed(other))
        is_there = others.has_finished and not other.further and others.opened_at > evidence.last_reset(watched)
        if is_there and evidence.domain(other) == evidence.domain(part):
            whole = (ids[: len(ids) // BLOCK * BLOCK] for ids in evidence.sequences(other))
            shared = max(shared, *(common(part.prompt, ids) for ids in whole))
    return shared if num_blocks < evidence.engine["num_blocks"] * (1 - evidence.engine["watermark"]) else 0


def _begin_alike(part: Arrival, ids: tuple[int, ...]) -> bool:
    return common(part.prompt, ids) >= BLOCK


def _was_evicted(
    evidence: Evidence, arrival: Arrival, watched: Watched, record: Record, prompt: Explained
) -> Iterator[str]:
    """Yield what cannot be about the eviction of the block after a cached prefix."""
    name, admitted_at = arrival.request_id, record.get("admitted_at")
    if prompt.evicted_at is None or admitted_at is None or not (evidence.is_quiet or is_afterwards(arrival)):
        return
    evicted_s = watched.opened_at + prompt.evicted_at - record["received_at"]
    # of several prompts, others than the first are admitted later
    latest_s = watched.ended_at if arrival.further else watched.opened_at + admitted_at - record["received_at"]
    if evicted_s > latest_s + EPSILON_S:
        yield f"{name} misses a block that was evicted at {evicted_s:g} s, after its admission"
    if (prompt.idle_s or 0.0) < 0:
        yield f"{name} misses a block that had been idle for {prompt.idle_s} s"
    by = next((other for other in evidence.seen.plan.all_arrivals if other.request_id == prompt.evicted_by), None)
    if by is None:
        if evidence.is_quiet:
            yield f"{name} misses a block that was evicted for {prompt.evicted_by}"
        return
    asked = evidence.seen.watched[by.number]
    if evicted_s > asked.ended_at + PROMPTLY_S:
        yield f"{name} misses a block that was evicted at {evicted_s:g} s for {by.request_id}, which had ended"
    if evicted_s < asked.opened_at - EPSILON_S and not evidence.engine.get("has_peers"):
        yield f"{name} misses a block that was evicted at {evicted_s:g} s for {by.request_id}, which had not come"
