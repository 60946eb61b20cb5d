"""Rules about accounts, records and the ledger's bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.arrival import BLOCK, Arrival
from tests.simulation.evidence import Evidence, Record
from tests.simulation.seen import Watched

TIERS = ("device", "host", "disk", "remote")
EPSILON_S = 1e-6
ZERO = frozenset(
    {
        "completion_tokens",
        "created_5m_tokens",
        "created_1h_tokens",
        "draft_tokens",
        "accepted_draft_tokens",
        "reasoning_tokens",
    }
)
"""Fields that a line of the ledger leaves out if they are 0; others, if they are not known."""


def told_is_written(evidence: Evidence) -> Iterator[str]:
    """What a client was told, at the start and at the end, is what its record says."""
    for arrival, watched, record in evidence.recorded():
        name, starts = arrival.request_id, watched.numbers
        written = record.get("prompt_tokens"), record.get("cached_tokens")
        if arrival.further:
            starts = starts[-1:] if watched.has_finished else []  # numbers grow with each prompt that is admitted
        for start in starts:
            if (start.prompt_tokens, start.cached_tokens) != written:
                yield f"{name} was told {start.prompt_tokens}, {start.cached_tokens}, its record says {written}"
            if (start.cache_write_tokens or 0) > (record.get("cache_write_tokens") or 0):
                yield f"{name} was told {start.cache_write_tokens} written tokens, its record says less"
        for end in watched.ends:
            if not end.is_final:
                told = end.told["prompt_tokens"]
                if told is not None and arrival.further and told < (written[0] or 0):
                    continue  # others of its prompts were admitted since
                if told is not None and told != written[0]:
                    yield f"{name} was told {end.told['prompt_tokens']} prompt tokens, its record says {written[0]}"
                continue
            for field, told in end.told.items():
                if record.get(field, 0 if field in ZERO else None) != told:
                    yield f"{name} was told {field} {told!r}, its record says {record.get(field)!r}"


def records_add_up(evidence: Evidence) -> Iterator[str]:
    """Each prompt token was read, computed or restored once; tiers add up; nothing is disputed."""
    for arrival, watched, record in evidence.recorded():
        name, number = arrival.request_id, record.get
        if record.get("disputed"):
            yield f"{name} is disputed: {record}"
        prompt, cached = number("prompt_tokens"), number("cached_tokens")
        if prompt is None:
            if record["outcome"] == "finished":
                yield f"{name} finished, and its prompt is unknown"
            continue
        is_cut = arrival.further and record["outcome"] != "finished"  # perhaps before all prompts were admitted
        if prompt != arrival.num_prompt_tokens and not (is_cut and prompt < arrival.num_prompt_tokens):
            yield f"{name} has {prompt} prompt tokens instead of {arrival.num_prompt_tokens}"
        most = sum((len(part.prompt) - 1) // BLOCK * BLOCK for part in arrival.parts)
        if cached is None or not 0 <= cached <= most or cached % BLOCK:
            yield f"{name} has {cached} cached of {prompt} prompt tokens"
            continue
        yield from _tiers_add_up(evidence, name, record)
        covered = cached + number("computed_tokens", 0) + number("restored_tokens", 0)
        most = (
            arrival.num_prompt_tokens * arrival.num_choices
        )  # other choices read what the first has computed, or compute it
        if covered > most or (record["outcome"] == "finished" and covered < prompt):
            yield f"{name} covered {covered} of {prompt} prompt tokens: {record}"
        yield from _outputs_add_up(evidence, arrival, watched, record)


def _tiers_add_up(evidence: Evidence, name: str, record: Record) -> Iterator[str]:
    cached, setup = record["cached_tokens"], evidence.seen.plan.setup
    by_tier = {tier: record.get(f"cached_{tier}_tokens") or 0 for tier in TIERS}
    if sum(by_tier.values()) != cached or record.get("cached_unattributed_tokens"):
        yield f"{name} has {cached} cached tokens, by tier {by_tier}"
    if any(num < 0 or num % BLOCK for num in by_tier.values()):
        yield f"{name} has no whole blocks by tier: {by_tier}"
    absent = [tier for tier in TIERS[1:] if tier not in setup.tiers]
    if any(by_tier[tier] for tier in absent):
        yield f"{name} has tokens of a tier that there is not: {by_tier}"


def _outputs_add_up(evidence: Evidence, arrival: Arrival, watched: Watched, record: Record) -> Iterator[str]:
    name, number = arrival.request_id, record.get
    prompt, written = record["prompt_tokens"], number("cache_write_tokens") or 0
    if written > prompt - record["cached_tokens"] or written % BLOCK:
        yield f"{name} wrote {written} of {prompt} prompt tokens, {record['cached_tokens']} cached"
    created = number("created_5m_tokens", 0) + number("created_1h_tokens", 0)
    if created > written or (created and not arrival.marks):
        yield f"{name} created {created} tokens and wrote {written}, with {len(arrival.marks)} marks"
    given = sum(piece.num_tokens for piece in watched.pieces)
    completion = number("completion_tokens", 0)
    want = sum(evidence.answer(arrival, choice).num_tokens for choice in range(arrival.num_outputs))
    is_finished = record["outcome"] == "finished"
    if completion > want or (is_finished and completion != want) or given > completion:
        yield f"{name} has {completion} completion tokens, was given {given}, of {want}"
    if watched.ends and watched.ends[0].is_final and given != completion:
        yield f"{name} has {completion} completion tokens, and was given {given}"
    drafted, accepted = number("draft_tokens", 0), number("accepted_draft_tokens", 0)
    if not 0 <= accepted <= drafted or (drafted and not evidence.seen.plan.setup.drafts):
        yield f"{name} has {accepted} accepted of {drafted} drafted tokens"


def work_is_done_once(evidence: Evidence) -> Iterator[str]:
    """Where no engine has lost anything, and no sequence its blocks, no position is computed again."""
    is_alone = evidence.seen.plan.setup.num_engines == 1 and not evidence.happened("add engine")
    if not (evidence.keeps_cache and is_alone) or evidence.metric("num_preemptions_total"):
        return
    for arrival, _, record in evidence.recorded():
        for field in ("recomputed_tokens", "moved_tokens", "engine_deaths"):
            if record.get(field):
                yield f"{arrival.request_id} has {record[field]} {field}"
        if record.get("restored_tokens", 0) > (BLOCK - 1) * arrival.num_outputs:  # of a block that was copied
            yield f"{arrival.request_id} has {record['restored_tokens']} restored tokens"


def moves_are_told(evidence: Evidence) -> Iterator[str]:
    """A record whose blocks came from another engine says where they went, and which engine went on."""
    for arrival, _, record in evidence.recorded():
        moved = record.get("moved_tokens", 0)
        by_engine = [int(word.partition(":")[2]) for word in record.get("moved_by_engine", "").split()]
        if sum(by_engine) != moved:
            yield f"{arrival.request_id} has {moved} moved tokens, by engine {by_engine}"
        if moved and record["outcome"] == "finished" and record.get("decode_engine") is None:
            yield f"{arrival.request_id} has {moved} moved tokens, and no engine that went on"
        if moved and not evidence.engine.get("has_peers"):
            yield f"{arrival.request_id} has {moved} moved tokens, and engines have no peers"


def times_are_in_order(evidence: Evidence) -> Iterator[str]:
    """A request is received, admitted, gets its first token and is closed in this order, as its client saw it."""
    for arrival, watched, record in evidence.recorded():
        at = [
            watched.opened_at + record[field] - record["received_at"]
            for field in ("received_at", "admitted_at", "first_token_at", "closed_at")
            if record.get(field) is not None
        ]
        if at != sorted(at):
            yield f"{arrival.request_id} has times in disorder: {record}"
        if record.get("first_token_at") is None:
            if any(piece.num_tokens for piece in watched.pieces):
                yield f"{arrival.request_id} got tokens, and has no time of the first"
        else:
            first = next((piece.at for piece in watched.pieces if piece.num_tokens), None)
            if first is not None and first < at[2] - EPSILON_S:
                yield f"{arrival.request_id} had a token at {first:g}, its record says {at[2]:g}"
        for end in watched.ends:
            if end.is_final and end.at < at[-1] - EPSILON_S:
                yield f"{arrival.request_id} was told its end at {end.at:g}, its record says {at[-1]:g}"


def ledger_is_whole(evidence: Evidence) -> Iterator[str]:
    """Every line of the ledger is readable, and chained to the one before; no end is told before it is safe."""
    yield from evidence.damage
    for arrival, watched in evidence.requests():
        if not watched.was_safe:
            yield f"{arrival.request_id} was told its end before its record was safe"
