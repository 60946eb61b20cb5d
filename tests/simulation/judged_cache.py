"""Rules about the cache: nothing is found that cannot be there, and what must be there is found."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.arrival import BLOCK, SLOT_BYTES, STEP_S, Arrival
from tests.simulation.evidence import Evidence, Record, common, is_afterwards
from tests.simulation.seen import Watched

SETTLED_S = 3 * STEP_S
"""After a token has come, until what its pass has written can be found."""
EPSILON_S = 1e-6
TTL_S = {False: 300.0, True: 3600.0}
"""How long what is marked for five minutes, or for an hour, is pinned after its last use."""
EXPIRES_LATE_S = 1.0
MOST_PINNED = 0.5
"""The share of the blocks that may be pinned."""
Prefix = tuple[tuple[str, str, str], tuple[int, ...]]
"""A block: who may find it, and all tokens up to its end."""


def cached_is_possible(evidence: Evidence) -> Iterator[str]:
    """No more is cached than the same tenant, with the same salt and adapter, has sent or got since the last reset."""
    for arrival, watched, record in evidence.recorded():
        cached = record.get("cached_tokens")
        if not cached:
            continue
        name = arrival.request_id
        if not evidence.engine["enable_prefix_caching"] or not arrival.reads_cache:
            yield f"{name} has {cached} cached tokens, and reads no cache"
        # an object store, which servers share, is not reset
        reset_s = -1.0 if evidence.seen.plan.setup.has_objects else evidence.last_reset(watched)
        admitted_s = watched.opened_at + record["admitted_at"] - record["received_at"]
        if arrival.further:
            admitted_s = watched.ended_at  # the first prompt was admitted earlier than the last
        there: list[Arrival] = []
        for other, others in evidence.requests():
            is_earlier = others.opened_at <= admitted_s + EPSILON_S and other.number != arrival.number
            is_earlier &= others.ended_at >= reset_s  # nothing is found that was over when the cache was reset
            # an engine may die before its admission is heard, and the next one find what it has computed
            is_earlier |= other.number == arrival.number and bool(record.get("engine_deaths"))
            if is_earlier and evidence.domain(other) == evidence.domain(arrival):
                there.append(other)
        most = 0
        for part in arrival.parts:
            beside = [other for other in arrival.parts if other.part != part.part]  # admitted together, or one by one
            found = (common(part.prompt, ids) for other in (*there, *beside) for ids in evidence.computed(other))
            most += max(found, default=0) // BLOCK * BLOCK
        if cached > most:
            yield f"{name} has {cached} cached tokens; at most {most} were ever there"


def cached_is_found(evidence: Evidence) -> Iterator[str]:
    """Where one engine has room for everything and has lost nothing, what is there is found."""
    setup = evidence.seen.plan.setup
    if not (evidence.keeps_cache and evidence.has_room) or setup.num_engines > 1 or evidence.happened("add engine"):
        return
    yield from _found(evidence, list(evidence.recorded()))


def cached_is_found_afterwards(evidence: Evidence) -> Iterator[str]:
    """Whatever has happened, an engine that is alone finds what it has computed since."""
    if len(evidence.seen.engines_left) == 1:
        yield from _found(evidence, [one for one in evidence.recorded() if is_afterwards(one[0])])


def _found(evidence: Evidence, recorded: list[tuple[Arrival, Watched, Record]]) -> Iterator[str]:
    if not evidence.engine["enable_prefix_caching"]:
        return
    for arrival, watched, record in recorded:
        if record.get("cached_tokens") is None or not arrival.reads_cache or arrival.is_pushed_out or arrival.is_kept:
            continue
        if arrival.further and not watched.has_finished:
            continue  # some of its prompts may not have been admitted
        there: list[tuple[int, ...]] = []
        reset_s = evidence.last_reset(watched)
        for other, others, _ in recorded:
            if other.number == arrival.number or evidence.domain(other) != evidence.domain(arrival):
                continue
            if others.opened_at < reset_s:
                continue
            first = next((piece.at for piece in others.pieces if piece.num_tokens), None)
            if first is not None and not other.further and first + SETTLED_S < watched.opened_at:
                there.append(other.prompt)
            if others.has_finished and others.ended_at + SETTLED_S < watched.opened_at:
                there += evidence.sequences(other)
        least = sum(_least(part.prompt, there) for part in arrival.parts)
        if record["cached_tokens"] < least:
            yield f"{arrival.request_id} has {record['cached_tokens']} cached tokens; {least} were there"


def _least(prompt: tuple[int, ...], there: list[tuple[int, ...]]) -> int:
    """Return how many tokens of a prompt are found where these are there: whole blocks, but not its last token."""
    found = max((common(prompt, ids) for ids in there), default=0)
    return min(found, len(prompt) - 1) // BLOCK * BLOCK


def tiers_are_told(evidence: Evidence) -> Iterator[str]:
    """What others have pushed off the only device was not found there; if nothing is lost, it was found below."""
    if len(evidence.seen.engines_left) != 1:
        return
    for arrival, _, record in evidence.recorded():
        if not arrival.is_pushed_out or record.get("cached_tokens") is None:
            continue
        by_tier = {tier: record.get(f"cached_{tier}_tokens") or 0 for tier in ("device", "host", "disk")}
        found = by_tier["host"] + by_tier["disk"]
        most = (len(arrival.prompt) - 1) // BLOCK * BLOCK
        has_room = evidence.seen.plan.setup.host_blocks >= 64 and "kv_quota" not in evidence.engine
        if by_tier["device"] or (evidence.is_quiet and has_room and found < most):
            yield f"{arrival.request_id} found {by_tier} of {most} tokens that were pushed off the device"


def quotas_hold(evidence: Evidence) -> Iterator[str]:
    """No prompt finds more in a tier than its tenant may have there."""
    if (quota := evidence.engine.get("kv_quota")) is None:
        return
    for arrival, _, record in evidence.recorded():
        for tier in ("host", "disk"):
            found = record.get(f"cached_{tier}_tokens") or 0
            if found * SLOT_BYTES > quota * len(arrival.parts):
                yield f"{arrival.request_id} found {found} tokens in {tier}, of {quota} bytes that its tenant may have"


def loads_are_hits(evidence: Evidence) -> Iterator[str]:
    """What was loaded from a tier is what requests say came from there, apart from those that do not say all."""
    if not evidence.keeps_cache or evidence.engine.get("has_peers"):
        return
    for tier in evidence.seen.plan.setup.tiers:
        loaded = evidence.metric("kv_tier_loaded_blocks_total", tier=tier) * BLOCK
        said = unsaid = 0
        num_again = int(evidence.metric("num_preemptions_total"))
        for arrival, _ in evidence.requests():
            record = evidence.record(arrival) or {}
            said += record.get(f"cached_{tier}_tokens") or 0
            if num_again:
                tokens = sum(len(part.prompt) + arrival.max_tokens for part in arrival.parts)
                unsaid += tokens * arrival.num_choices * (1 + num_again)
            elif not is_afterwards(arrival):  # nobody has asked for these before
                was_told = record.get("prompt_tokens") is not None
                unsaid += arrival.num_prompt_tokens * (arrival.num_choices - was_told)
        if loaded < said or (not said and loaded > unsaid):
            yield f"{loaded:g} tokens were loaded from {tier}, requests say {said}, and may not say {unsaid}"


def written_once(evidence: Evidence) -> Iterator[str]:
    """Where nothing is evicted or lost, each block is written by one request, and by one that has sent it."""
    setup = evidence.seen.plan.setup
    if not (evidence.keeps_cache and evidence.has_room) or setup.num_engines > 1 or evidence.happened("add engine"):
        return
    if evidence.seen.resets:
        return  # what is computed again is written again
    blocks: set[Prefix] = set()
    written = 0
    for arrival, _, record in evidence.recorded():
        written += record.get("cache_write_tokens") or 0
        for part in arrival.parts:
            ends = range(BLOCK, len(part.prompt) + 1, BLOCK)
            blocks.update((evidence.domain(arrival), part.prompt[:end]) for end in ends)
    if written > len(blocks) * BLOCK:
        yield f"{written} tokens were written, in {len(blocks)} different blocks"
    for arrival, watched, record in evidence.recorded():
        if not watched.has_finished or not evidence.engine["enable_prefix_caching"] or arrival.further:
            continue
        shared = 0
        for other, _ in evidence.requests():
            if other.number != arrival.number and evidence.domain(other) == evidence.domain(arrival):
                shared = max(shared, *(common(arrival.prompt, ids) for ids in evidence.computed(other)))
        alone = len(arrival.prompt) // BLOCK * BLOCK - shared // BLOCK * BLOCK
        if (record.get("cache_write_tokens") or 0) < alone:
            yield f"{arrival.request_id} wrote {record.get('cache_write_tokens')} tokens; {alone} are its own"


def pins_are_kept(evidence: Evidence) -> Iterator[str]:
    """What clients have marked, and nothing else, is kept; what they are billed for it lies before their marks."""
    pinned: set[Prefix] = set()
    reset_s = max(evidence.seen.resets, default=-1.0)
    over = _expired(evidence)
    for arrival, watched, record in evidence.recorded():
        last = max(arrival.mark_positions, default=0) // BLOCK * BLOCK
        if watched.ended_at < reset_s - SETTLED_S:
            last = 0  # a reset releases what was pinned
        blocks = {(evidence.domain(arrival), arrival.prompt[:end]) for end in range(BLOCK, last + 1, BLOCK)}
        pinned |= blocks - over
        created = [record.get(f"created_{ttl}_tokens", 0) for ttl in ("5m", "1h")]
        by_ttl = [0, 0]
        so_far = 0
        for mark, position in zip(arrival.marks, arrival.mark_positions, strict=True):
            by_ttl[mark.is_long] += position // BLOCK * BLOCK - so_far
            so_far = position // BLOCK * BLOCK
        if any(num > most for num, most in zip(created, by_ttl, strict=True)):
            yield f"{arrival.request_id} created {created} tokens, its marks allow {by_ttl}"
    found = evidence.metric("kv_blocks", state="pinned")
    most = min(len(pinned), MOST_PINNED * evidence.engine["num_blocks"]) * max(1, len(evidence.seen.engines_left))
    if found > most:
        yield f"{found:g} blocks are pinned, {len(pinned)} were marked and have time left; there may be {most:g}"


def pins_hold(evidence: Evidence) -> Iterator[str]:
    """What was billed as kept is found again on the device, though all else was pushed off it."""
    if len(evidence.seen.engines_left) != 1:
        return
    for arrival, _, record in evidence.recorded():
        if not arrival.is_kept:
            continue
        created = [
            sum(earlier.get(f"created_{ttl}_tokens", 0) for ttl in ("5m", "1h"))
            for other, _, earlier in evidence.recorded()
            if other.marks == arrival.marks and other.tenant == arrival.tenant and not other.is_kept
        ]
        if record.get("cached_device_tokens", 0) < max(created, default=0):
            yield f"{arrival.request_id} found {record.get('cached_tokens')} of {created} tokens that are kept"


def _expired(evidence: Evidence) -> set[Prefix]:
    """Return what is no longer pinned on an engine that is alone: its time was over when the last request came."""
    if len(evidence.seen.engines_left) != 1 or not any(arrival.marks for arrival, _ in evidence.requests()):
        return set()
    last_s = max((watched.opened_at for _, watched in evidence.requests()), default=0.0)
    over_s: dict[Prefix, float] = {}
    for arrival, watched in evidence.requests():
        for part in arrival.parts:
            for end in range(BLOCK, len(part.prompt) + 1, BLOCK):
                prefix = evidence.domain(arrival), part.prompt[:end]
                over_s[prefix] = max(over_s.get(prefix, 0.0), watched.ended_at)
    lives_s: dict[Prefix, float] = {}
    for arrival, _ in evidence.requests():
        for mark, position in zip(arrival.marks, arrival.mark_positions, strict=True):
            for end in range(BLOCK, position + 1, BLOCK):
                prefix = evidence.domain(arrival), arrival.prompt[:end]
                lives_s[prefix] = max(lives_s.get(prefix, 0.0), TTL_S[mark.is_long])
    return {prefix for prefix, ttl_s in lives_s.items() if over_s[prefix] + ttl_s + EXPIRES_LATE_S < last_s}
