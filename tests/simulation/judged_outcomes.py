"""Rules about how requests end: one outcome each, for a reason, in time, on an engine that was there for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.simulation.arrival import BLOCK, Arrival
from tests.simulation.evidence import Evidence, is_afterwards
from tests.simulation.seen import Watched

ANSWER_LATE_S = 2.5
"""How long the answer that a deadline has passed may take while actors are restarted..."""
AT_ONCE_S = 0.1
"""...and otherwise."""
EPSILON_S = 1e-6
TOGETHER_S = 0.1
"""Of admissions by different engines that are closer, either may be heard of first."""
OF_REMOVED = "The engine of this request was removed."
MODES = ("finish", "hand over", "move")
"""What becomes of an engine's requests when it is drained, by the amount of the fault."""
HARMLESS = frozenset({"drain engine", "repeat report", "clock step", "lose mask"})
"""Faults that move no request, but for a drain."""
DISK_FAULTS = ("disk full", "writes fail", "short writes", "syncs fail")


def one_outcome(evidence: Evidence) -> Iterator[str]:
    """Each request is answered once, unless its client has left, and has one record with the same outcome."""
    for arrival, watched in evidence.requests():
        name, ends = arrival.request_id, watched.ends
        if len(ends) + (watched.left_at is not None) != 1:
            yield f"{name} was answered {len(ends)} times, and left at {watched.left_at}"
        records = evidence.records.get(name, [])
        if len(records) != 1:
            yield f"{name} has {len(records)} records"
        for record in records:
            if ends and ends[0].is_final and record["outcome"] != ends[0].told["outcome"]:
                yield f"{name} was told {ends[0].told['outcome']}, its record says {record['outcome']}"
            if watched.left_at is None and record["outcome"] == "cancelled":
                yield f"{name} is cancelled, and its client has not left"
            if watched.has_finished and record.get("fault") is not None:
                yield f"{name} has finished, and its record says {record['fault']}"
    known = {arrival.request_id for arrival, _ in evidence.requests()}
    for stranger in evidence.records.keys() - known:
        yield f"a record of {stranger}, which was never opened"


def record_says_whose(evidence: Evidence) -> Iterator[str]:
    """A record has its request's tenant, names, seed, adapter and number of choices."""
    for arrival, _, record in evidence.recorded():
        wanted = {
            "tenant": arrival.tenant,
            "client_request_id": f"client-{arrival.number}",
            "endpoint": "simulation",
            "model": arrival.adapter or "demo",
            "adapter": evidence.digest_of(arrival) or None,
            "idempotency_key": arrival.idempotency_key or None,
            "idempotency_digest": f"{arrival.tenant} {arrival.idempotency_key}" if arrival.idempotency_key else None,
            "parent": "demo" if arrival.adapter else None,
            "seed": arrival.seed - (1 << 64) if arrival.seed >> 63 else arrival.seed,
        }
        if arrival.is_embedded:
            wanted |= {"kind": "embed", "seed": None}
        if record["outcome"] == "finished":
            wanted["num_choices"] = arrival.num_outputs
            wanted["finish_reason"] = evidence.answer(arrival).reason
        for field, value in wanted.items():
            if record.get(field) != value:
                yield f"{arrival.request_id} has {field} {record.get(field)!r} instead of {value!r}"


def retries_are_told(evidence: Evidence) -> Iterator[str]:
    """A record names the first admitted request of its tenant with the same idempotency key, and no other."""
    admitted_s = {
        arrival.request_id: watched.opened_at + record["admitted_at"] - record["received_at"]
        for arrival, watched, record in evidence.recorded()
        if record.get("admitted_at") is not None and record.get("prompt_tokens") is not None
    }
    for arrival, _, record in evidence.recorded():
        name, named = arrival.request_id, record.get("retry_of")
        same = [
            other.request_id
            for other, _ in evidence.requests()
            if (other.tenant, other.idempotency_key) == (arrival.tenant, arrival.idempotency_key)
            and other is not arrival
        ]
        if named is not None and not (arrival.idempotency_key and named in same):
            yield f"{name} is said to repeat {named}, not one of {same}"
        if not (evidence.is_quiet and arrival.idempotency_key and name in admitted_s):
            continue
        first_s = min((admitted_s[other] for other in same if other in admitted_s), default=math.inf)
        if named is None and first_s + TOGETHER_S < admitted_s[name]:
            yield f"{name} is not said to repeat one of {same}"
        if named is not None and admitted_s.get(named, math.inf) > min(first_s, admitted_s[name]) + TOGETHER_S:
            yield f"{name} is said to repeat {named}, which was not the first of {same}"


def outcome_has_a_reason(evidence: Evidence) -> Iterator[str]:
    """A request fails, is rejected or cancelled only for a fault, its deadline or its client."""
    for arrival, watched in evidence.requests():
        if not watched.ends:
            continue
        name, outcome, error = arrival.request_id, watched.ends[0].told["outcome"], watched.ends[0].error
        if evidence.is_too_long(arrival):
            if outcome != "rejected" or error is None or error[0] not in ("invalid", "internal"):
                yield f"{name}, which is too long, is {outcome}: {error}"
            continue
        if watched.has_finished:
            continue
        if error is None:
            yield f"{name} is {outcome} without an error"
        elif error[0] in ("overloaded", "invalid") and _is_turned_away(evidence, arrival, watched):
            continue
        elif not (_is_told_why(evidence, arrival, outcome, error[0]) or _may_fail(evidence, arrival, watched)):
            yield f"{name} is {outcome}: {error[1]}"


def _is_told_why(evidence: Evidence, arrival: Arrival, outcome: str, kind: str) -> bool:
    """Whether a request ends for its deadline, or for want of a place for its record."""
    if arrival.deadline_s is not None and kind == "timeout":
        return True
    return outcome == "rejected" and evidence.happened(*DISK_FAULTS) and not is_afterwards(arrival)


def _is_turned_away(evidence: Evidence, arrival: Arrival, watched: Watched) -> bool:
    """Whether a request had so many others, or such long ones, beside it that it might not wait."""
    engine, share = evidence.engine, evidence.engine["max_waiting_share"]
    limit, tokens = engine["max_waiting_requests"] * share, engine.get("max_waiting_tokens", 0) * share
    beside = [
        other
        for other, others in evidence.requests()
        if others.opened_at <= watched.ended_at and others.ended_at >= watched.opened_at
    ]
    if watched.pieces and not arrival.further:
        return False  # who was served once may wait as long as it takes
    are_many = sum(other.num_outputs for other in beside) > limit
    have_many = sum(other.num_prompt_tokens * other.num_choices for other in beside) > tokens
    return bool((limit and are_many) or (tokens and have_many))


def _may_fail(evidence: Evidence, arrival: Arrival, watched: Watched) -> bool:
    """Whether faults explain an error: a request may be blamed for two deaths, or fit in no pass.

    Several passes in a row that raise may be those in which it is alone.
    """
    if is_afterwards(arrival):
        return False
    seen, record = evidence.seen, evidence.record(arrival)
    amounts = {fault.number: fault.amount for fault in seen.plan.faults}
    if sum(amounts[fault.number] for fault in seen.happened if fault.kind == "fail passes") > 1:
        return True
    for fault in seen.happened:
        if fault.kind == "no memory" and amounts[fault.number] <= BLOCK:
            return True
        if fault.kind == "lose mask" and arrival.grammar:
            return True
    if evidence.resumes_nothing:
        if evidence.happened("drain engine") and watched.ends[0].error == ("overloaded", OF_REMOVED):
            return True
        if record is not None and record.get("fault") == "engine_died":
            return any(watched.opened_at <= at <= watched.ended_at for at in seen.deaths)
    crashes = sum(watched.opened_at <= at <= watched.ended_at for at in seen.crash_times)
    deaths = 0 if record is None else record.get("engine_deaths", 0)
    return crashes >= 2 or deaths >= 2


def deadlines_hold(evidence: Evidence) -> Iterator[str]:
    """A client with a deadline is answered when it has passed, and not told so before."""
    for arrival, watched in evidence.requests():
        if arrival.deadline_s is None:
            continue
        due_s = watched.opened_at + arrival.deadline_s
        late_s = AT_ONCE_S if evidence.is_quiet or is_afterwards(arrival) else ANSWER_LATE_S
        if watched.ended_at > due_s + 2 * arrival.read_pause_s + late_s:
            yield f"{arrival.request_id} was due at {due_s:g} and ended at {watched.ended_at:g} s"
        for end in watched.ends:
            is_early = end.at < watched.opened_at + arrival.deadline_s - EPSILON_S
            if end.error is not None and end.error[0] == "timeout" and is_early:
                yield f"{arrival.request_id} was told at {end.at:g} s that its deadline has passed, due at {due_s:g}"


def drained_engine_gets_nothing(evidence: Evidence) -> Iterator[str]:
    """An engine that was to end is gone in the end, and has admitted nothing that came after it was told."""
    engines = {fault.number: fault.engine for fault in evidence.seen.plan.faults}
    for fault in evidence.seen.happened:
        if fault.kind != "drain engine":
            continue
        drained = engines[fault.number]
        if drained in evidence.seen.engines_left:
            yield f"engine {drained} was drained at {fault.began_s:g} s, and is still there"
        for arrival, watched, record in evidence.recorded():
            if watched.opened_at > fault.began_s and record.get("engine") == drained:
                yield f"{arrival.request_id} came after engine {drained} was to end, and was admitted there"


def drains_keep_their_time(evidence: Evidence) -> Iterator[str]:
    """An engine that is drained to finish its requests keeps them until its time is up, and no longer."""
    seen = evidence.seen
    drains = [fault for fault in seen.happened if fault.kind == "drain engine"]
    if len(drains) != 1 or seen.num_engine_deaths or evidence.engine.get("has_peers"):
        return
    (drawn,) = (fault for fault in seen.plan.faults if fault.number == drains[0].number)
    if seen.crashed or any(fault.kind not in HARMLESS for fault in seen.happened):
        return
    mode = MODES[drawn.amount % len(MODES)]
    until_s = drains[0].began_s + (drawn.lasts_s if mode == "finish" else 0.0)
    for arrival, watched, record in evidence.recorded():
        if record.get("engine") != drawn.engine:
            continue
        own = seen.passes.sequences_of(arrival.request_id)
        left_s = [seen.passes.resumed_at[i] for i in own if i in seen.passes.resumed_at]
        left_s += [end.at for end in watched.ends if end.error == ("overloaded", OF_REMOVED)]
        if left_s and min(left_s) < until_s - EPSILON_S:
            name = arrival.request_id
            yield f"{name} left engine {drawn.engine} at {min(left_s):g} s, which had until {until_s:g} s"
        over_s = max((piece.at for piece in watched.pieces), default=0.0)
        went_on = watched.has_finished and not left_s and not arrival.read_pause_s and not arrival.further
        if went_on and over_s > until_s + AT_ONCE_S:
            yield f"{arrival.request_id} was on engine {drawn.engine} until {over_s:g} s, which had until {until_s:g} s"
