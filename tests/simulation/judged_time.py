"""Rules about time and order, and about what remains in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.simulation.arrival import BLOCK, STEP_S, Arrival
from tests.simulation.evidence import Evidence, common, is_afterwards

PATIENCE_S = 5.0
"""What a request may take beyond three times its quiet time, after the last fault."""
PATIENCE_AFTERWARDS_S = 1.5
"""The same when nothing disturbs it."""
PROMPTLY_S = 0.2
"""Until a quiet engine has ended what nobody wants any more, or a client hears of an end."""
TURN_S = 0.1
"""How much earlier a request has to come to be before another, whatever its text needs."""


def nothing_waits_too_long(evidence: Evidence) -> Iterator[str]:
    """Nothing waits longer than three times its quiet time and five seconds after the last fault."""
    seen = evidence.seen
    for arrival, watched in evidence.requests():
        quiet_s = _quiet_s(evidence, arrival)
        read_s = arrival.read_pause_s * (len(watched.events) + 1)
        begins_s = max(watched.opened_at, seen.last_fault_s)
        is_awaited = is_afterwards(arrival) and not arrival.is_batch
        patience_s = PATIENCE_AFTERWARDS_S if is_awaited else PATIENCE_S
        if evidence.happened("no memory"):  # for up to a minute, a step may have a single position
            patience_s += sum(_quiet_s(evidence, other) for other, _ in evidence.requests())
        if watched.ended_at > begins_s + 3 * quiet_s + patience_s + read_s:
            yield f"{arrival.request_id} came at {watched.opened_at:g} and ended at {watched.ended_at:g} s"
    for arrival in seen.plan.all_arrivals:
        asked = seen.watched.get(arrival.number)
        if asked is not None and asked.refused is not None and (evidence.is_quiet or is_afterwards(arrival)):
            yield f"{arrival.request_id} was refused: {asked.refused}"


def _quiet_s(evidence: Evidence, arrival: Arrival) -> float:
    """Return what a request takes if it is alone: a pass for each chunk of its prompt and for each token."""
    most = evidence.engine["max_num_batched_tokens"]
    passes = sum(-(-len(part.prompt) // most) + arrival.max_tokens for part in arrival.parts)
    return float(passes * arrival.num_choices * STEP_S)


def ends_are_prompt(evidence: Evidence) -> Iterator[str]:
    """Where no fault has happened, what has ended is closed, and what nobody wants any more is ended."""
    for arrival, watched, record in evidence.recorded():
        if not (evidence.is_quiet or is_afterwards(arrival)):
            continue
        closed_s = watched.opened_at + record["closed_at"] - record["received_at"]
        over_s = watched.left_at
        if watched.has_finished and not arrival.read_pause_s:
            over_s = max(piece.at for piece in watched.pieces)
            if watched.ended_at > closed_s + PROMPTLY_S:
                yield f"{arrival.request_id} was closed at {closed_s:g}, and told so at {watched.ended_at:g} s"
        if arrival.deadline_s is not None:
            over_s = min(over_s or math.inf, watched.opened_at + arrival.deadline_s)
        if over_s is not None and closed_s > over_s + PROMPTLY_S:
            yield f"{arrival.request_id} was over at {over_s:g}, and closed at {closed_s:g} s"


def turns_are_kept(evidence: Evidence) -> Iterator[str]:
    """An engine that is alone admits what is more urgent first, and of the rest what came first."""
    engine, setup = evidence.engine, evidence.seen.plan.setup
    if engine["scheduling_policy"] == "fair" or len(evidence.seen.engines_left) > 1:
        return
    has_slots = engine["submit_slots"] >= 16 and engine["encode_slots"] >= 16
    admitted = [
        (arrival, watched.opened_at, watched.opened_at + record["admitted_at"] - record["received_at"])
        for arrival, watched, record in evidence.recorded()
        if record.get("admitted_at") is not None
        and (is_afterwards(arrival) or (evidence.is_quiet and setup.num_engines == 1 and has_slots))
    ]
    for arrival, opened_s, admitted_s in admitted:
        if arrival.deadline_s is not None or arrival.num_outputs > 1 or _shares_blocks(evidence, arrival):
            continue  # it may have waited for what another computes
        for other, other_opened_s, other_admitted_s in admitted:
            first = [arrival.is_batch, arrival.priority if engine["scheduling_policy"] == "priority" else 0]
            second = [other.is_batch, other.priority if engine["scheduling_policy"] == "priority" else 0]
            is_before = first < second or (first == second and opened_s + TURN_S < other_opened_s)
            if is_before and opened_s + TURN_S < other_admitted_s < admitted_s - STEP_S / 2:
                name = arrival.request_id
                yield f"{name} came at {opened_s:g} and waited for {other.request_id}, until {admitted_s:g} s"


def _shares_blocks(evidence: Evidence, arrival: Arrival) -> bool:
    return any(
        common(arrival.prompt, part.prompt) >= BLOCK
        for other in evidence.seen.plan.all_arrivals
        if other.number != arrival.number
        for part in other.parts
    )


def nothing_remains(evidence: Evidence) -> Iterator[str]:
    """Once all clients are gone, the server holds nothing but its caches."""
    for what, count in evidence.seen.leftovers.items():
        yield f"{count} {what}"
