"""Decides whether a run was right: from the plan and what clients, ledger and metrics show. No code of the server.

Each rule is a function that yields violations; `RULES` lists them. A violation names the rule and the request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from tests.simulation.arrival import BLOCK, STEP_S, Arrival
from tests.simulation.expected import Answer, answer_to
from tests.simulation.world import Seen, Watched

PATIENCE_S = 5.0
"""What a request may take beyond three times its quiet time, after the last fault."""
HEAD = 64
"""Characters of the hash before a ledger line's text."""
EPSILON = 1e-6
FIRST_HASH = "0" * HEAD
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""Shown in place of a character of which only some bytes came."""


@attrs.frozen
class Evidence:
    """What the rules look at."""

    seen: Seen
    records: dict[str, list[dict[str, Any]]]
    """Closing records of the ledger, by request."""
    damage: list[str]
    """What is wrong with the ledger's lines."""
    metrics: dict[str, float]

    @property
    def is_quiet(self) -> bool:
        """Whether no fault has happened."""
        return not self.seen.applied

    def answer(self, arrival: Arrival) -> Answer:
        return answer_to(arrival, tuple(self.seen.plan.setup.engine["eos_token_ids"]))

    def requests(self) -> Iterator[tuple[Arrival, Watched]]:
        """Yield the requests that were opened."""
        for arrival in self.seen.plan.arrivals:
            watched = self.seen.watched.get(arrival.number)
            if watched is not None and watched.refused is None:
                yield arrival, watched

    def record(self, arrival: Arrival) -> dict[str, Any] | None:
        found = self.records.get(arrival.request_id, [])
        return found[0] if found else None


def judge(seen: Seen) -> list[str]:
    """Return everything that is wrong with a run."""
    if seen.ended_with is not None:
        return [f"the server ended: {seen.ended_with}"]
    records, damage = _read_ledger(seen.ledger)
    evidence = Evidence(seen, records, damage, _read_metrics(seen.metrics))
    return [f"{name}: {what}" for name, rule in RULES.items() for what in rule(evidence)]


# ---------------------------------------------------------------- reading


def _read_ledger(data: bytes) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    records: dict[str, list[dict[str, Any]]] = {}
    damage: list[str] = []
    last, count = FIRST_HASH, 0
    for line in data.split(b"\n"):
        if not (line := line.strip(b"\0")):
            continue
        digest, text = line[:HEAD].decode("ascii", "replace"), line[HEAD + 1 :]
        if hashlib.sha256(text).hexdigest() != digest:
            damage.append(f"a line that is not one: {line[:100]!r}")
            continue
        entry = json.loads(text)
        if entry["kind"] == "admitted":
            continue
        if (entry["number"], entry["previous"]) != (count, last):
            damage.append(f"entry {entry['number']} does not follow entry {count - 1}")
        last, count = digest, entry["number"] + 1
        if entry["kind"] == "closed":
            records.setdefault(entry["record"]["request_id"], []).append(entry["record"])
    return records, damage


def _read_metrics(text: str) -> dict[str, float]:
    """Return the sum of each metric over its labels but the tier and the outcome."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^quipu:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        kept = re.search(r'(?:outcome|tier)="(\w+)"', labels)
        key = name if kept is None else f"{name}:{kept[1]}"
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _closings(watched: Watched) -> list[Any]:
    return [event for event in watched.events if event[1] == "closed"]


def _texts(watched: Watched) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in watched.events:
        if event[1] == "delta":
            texts[event[2]] = texts.get(event[2], "") + event[3]
    return texts


# ---------------------------------------------------------------- outcomes


def one_outcome(evidence: Evidence) -> Iterator[str]:
    """Each request is answered once, unless its client has left, and has one record with the same outcome."""
    for arrival, watched in evidence.requests():
        closings = _closings(watched)
        if len(closings) + (watched.left_at is not None) != 1:
            yield f"{arrival.request_id} was answered {len(closings)} times, and left at {watched.left_at}"
        records = evidence.records.get(arrival.request_id, [])
        if len(records) != 1:
            yield f"{arrival.request_id} has {len(records)} records"
        for record in records:
            if closings and closings[0][4] and record["outcome"] != closings[0][2]["outcome"]:
                yield f"{arrival.request_id} was told {closings[0][2]['outcome']}, its record says {record['outcome']}"
            if record.get("tenant") != arrival.tenant:
                yield f"{arrival.request_id} of {arrival.tenant} was written for {record.get('tenant')}"
    known = {arrival.request_id for arrival, _ in evidence.requests()}
    for stranger in evidence.records.keys() - known:
        yield f"a record of {stranger}, which was never opened"


def outcome_has_a_reason(evidence: Evidence) -> Iterator[str]:
    """A request fails, is rejected or cancelled only for a fault, its deadline or its client."""
    seen = evidence.seen
    disk = any(kind in fault for fault in seen.applied for kind in ("disk full", "writes", "syncs fail"))
    for arrival, watched in evidence.requests():
        closings = _closings(watched)
        if not closings:
            continue
        outcome, error = closings[0][2]["outcome"], closings[0][3]
        if len(arrival.prompt) >= seen.plan.setup.engine["max_model_len"]:
            if outcome != "rejected" or error is None or error[0] not in ("invalid", "internal"):
                yield f"{arrival.request_id}, which is too long, is {outcome}: {error}"
            continue
        if outcome == "finished" and error is None:
            continue
        if arrival.deadline_s is not None and error is not None and error[0] == "timeout":
            continue
        if error is None:
            yield f"{arrival.request_id} is {outcome} without an error"
        elif outcome == "rejected" and disk:
            continue
        elif not _may_fail(evidence, arrival, watched):
            yield f"{arrival.request_id} is {outcome}: {error[1]}"


def _may_fail(evidence: Evidence, arrival: Arrival, watched: Watched) -> bool:
    """Whether faults explain an error: a request may be blamed for two deaths, or fit in no pass.

    Several passes in a row that raise may be those in which it is alone.
    """
    seen, record = evidence.seen, evidence.record(arrival)
    for fault in seen.plan.faults:
        if fault.kind == "fail passes" and fault.amount > 1 and str(fault) in seen.applied:
            return True
        if fault.kind == "no memory" and fault.amount <= BLOCK and str(fault) in seen.applied:
            return True
    crashes = sum(watched.opened_at <= at <= watched.ended_at for at in seen.crash_times)
    deaths = 0 if record is None else record.get("engine_deaths", 0)
    return crashes >= 2 or deaths >= 2


# ---------------------------------------------------------------- texts


def right_texts(evidence: Evidence) -> Iterator[str]:
    """A finished choice has exactly the text of an undisturbed run; one that was cut has a prefix of it."""
    for arrival, watched in evidence.requests():
        want, closings = evidence.answer(arrival), _closings(watched)
        texts = _texts(watched)
        reasons = {event[2]: event[5] for event in watched.events if event[1] == "delta" and event[5] is not None}
        is_finished = bool(closings) and closings[0][2]["outcome"] == "finished" and closings[0][3] is None
        for choice, text in texts.items():
            if not 0 <= choice < arrival.num_choices:
                yield f"{arrival.request_id} got choice {choice}"
            is_whole = choice in reasons
            if text != want.text if is_whole else not want.text.startswith(text.rstrip(UNREADABLE)):
                yield f"{arrival.request_id} choice {choice} got {text!r} instead of {want.text!r}"
            if is_whole and reasons[choice] != want.reason:
                yield f"{arrival.request_id} choice {choice} ended with {reasons[choice]}, not {want.reason}"
        if is_finished and len(reasons) != arrival.num_choices:
            yield f"{arrival.request_id} finished with {len(reasons)} of {arrival.num_choices} choices"


def nothing_after_the_end(evidence: Evidence) -> Iterator[str]:
    """Nothing of a choice comes after its reason to end, no token before the prompt's numbers.

    If the engine of a first choice dies before it is admitted, others are ahead of it.
    """
    for arrival, watched in evidence.requests():
        may_be_ahead = arrival.num_choices > 1 and evidence.seen.num_engine_deaths > 0
        ended: set[int] = set()
        has_started = False
        for event in watched.events:
            if event[1] == "started":
                has_started = True
            if event[1] == "delta":
                if not has_started and not may_be_ahead:
                    yield f"{arrival.request_id} got text before its numbers"
                if event[2] in ended:
                    yield f"{arrival.request_id} choice {event[2]} went on after its end"
                if event[5] is not None:
                    ended.add(event[2])


# ---------------------------------------------------------------- books


def told_is_written(evidence: Evidence) -> Iterator[str]:
    """What a client was told, at the start and at the end, is what its record says."""
    for arrival, watched in evidence.requests():
        if (record := evidence.record(arrival)) is None:
            continue
        starts = [event for event in watched.events if event[1] == "started"]
        for _, _, prompt, cached, _ in starts:
            if (prompt, cached) != (starts[0][2], starts[0][3]):
                yield f"{arrival.request_id} was told {starts[0][2:4]}, then {(prompt, cached)}"
        numbers = [(event[2], event[3]) for event in starts]
        for event in _closings(watched):
            told = event[2]
            if event[4]:
                numbers.append((told["prompt_tokens"], told["cached_tokens"]))
                if told["completion_tokens"] != record.get("completion_tokens", 0):
                    yield f"{arrival.request_id} was told {told}, its record says {record}"
        for prompt, cached in numbers:
            if (prompt, cached) != (record.get("prompt_tokens"), record.get("cached_tokens")) and prompt is not None:
                written = record.get("prompt_tokens"), record.get("cached_tokens")
                yield f"{arrival.request_id} was told {(prompt, cached)}, its record says {written}"


def records_add_up(evidence: Evidence) -> Iterator[str]:
    """Each prompt token was read, computed or restored once; tiers add up; nothing is disputed."""
    for arrival, watched in evidence.requests():
        if (record := evidence.record(arrival)) is None:
            continue
        name, number = arrival.request_id, record.get
        if record.get("disputed"):
            yield f"{name} is disputed: {record}"
        prompt, cached = number("prompt_tokens"), number("cached_tokens")
        if prompt is None:
            if record["outcome"] == "finished":
                yield f"{name} finished, and its prompt is unknown"
            continue
        if prompt != len(arrival.prompt):
            yield f"{name} has {prompt} prompt tokens instead of {len(arrival.prompt)}"
        if cached is None or not 0 <= cached <= (prompt - 1) // BLOCK * BLOCK or cached % BLOCK:
            yield f"{name} has {cached} cached of {prompt} prompt tokens"
            continue
        by_tier = sum(number(f"cached_{tier}_tokens") or 0 for tier in ("device", "host", "disk", "remote"))
        by_tier += number("cached_unattributed_tokens") or 0
        if by_tier != cached:
            yield f"{name} has {cached} cached tokens, {by_tier} by tier"
        covered = cached + (number("computed_tokens") or 0) + (number("restored_tokens") or 0)
        most = prompt * arrival.num_choices  # other choices read what the first has computed, or compute it
        if covered > most or (record["outcome"] == "finished" and covered < prompt):
            yield f"{name} covered {covered} of {prompt} prompt tokens: {record}"
        if (number("cache_write_tokens") or 0) > prompt - cached:
            yield f"{name} wrote {number('cache_write_tokens')} of {prompt} prompt tokens, {cached} cached"
        given = sum(event[4] for event in watched.events if event[1] == "delta")
        completion = number("completion_tokens") or 0
        is_finished = record["outcome"] == "finished" and _closings(watched)
        want = evidence.answer(arrival).num_tokens * arrival.num_choices
        if completion > want or (is_finished and completion != want) or given > completion:
            yield f"{name} has {completion} completion tokens, was given {given}, of {want}"


def counters_agree(evidence: Evidence) -> Iterator[str]:
    """The counters are the sums over the records."""
    records = [record for found in evidence.records.values() for record in found]
    admitted = [record for record in records if record.get("prompt_tokens") is not None]
    sums = {
        "prompt_tokens_total": sum(record["prompt_tokens"] for record in admitted),
        "prefix_cache_hits_total": sum(record.get("cached_tokens") or 0 for record in admitted),
        "generation_tokens_total": sum(record.get("completion_tokens", 0) for record in records),
        "usage_disputed_total": sum(bool(record.get("disputed")) for record in records),
        "open_accounts": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
    }
    for outcome in ("finished", "failed", "cancelled", "rejected"):
        sums[f"requests_total:{outcome}"] = sum(record["outcome"] == outcome for record in records)
    for name, wanted in sums.items():
        if (found := evidence.metrics.get(name, 0.0)) != wanted:
            yield f"{name} is {found:g}, the records say {wanted}"


def ledger_is_whole(evidence: Evidence) -> Iterator[str]:
    """Every line of the ledger is readable, and chained to the one before; no end is told before it is safe."""
    yield from evidence.damage
    for arrival, watched in evidence.requests():
        if not watched.was_safe:
            yield f"{arrival.request_id} was told its end before its record was safe"


# ---------------------------------------------------------------- cache


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def cached_is_possible(evidence: Evidence) -> Iterator[str]:
    """No more is cached than the same tenant, with the same salt, has sent or got before."""
    setup = evidence.seen.plan.setup
    sequences = {
        arrival.number: arrival.prompt + evidence.answer(arrival).token_ids for arrival, _ in evidence.requests()
    }
    for arrival, watched in evidence.requests():
        record = evidence.record(arrival)
        if record is None or not record.get("cached_tokens"):
            continue
        if not setup.engine["enable_prefix_caching"]:
            yield f"{arrival.request_id} has cached tokens, and there is no cache"
        most = 0
        for other, others in evidence.requests():
            is_earlier = others.opened_at <= watched.ended_at and other.number != arrival.number
            # an engine may die before its admission is heard, and the next one find what it has computed
            is_earlier |= other.number == arrival.number and bool(record.get("engine_deaths"))
            if is_earlier and (other.tenant, other.salt) == (arrival.tenant, arrival.salt):
                most = max(most, _common(arrival.prompt, sequences[other.number]) // BLOCK * BLOCK)
        if record["cached_tokens"] > most:
            yield f"{arrival.request_id} has {record['cached_tokens']} cached tokens; at most {most} were ever there"


def cached_is_found(evidence: Evidence) -> Iterator[str]:
    """In an undisturbed run with one engine and a cache that holds everything, what is there is found."""
    plan = evidence.seen.plan
    setup = plan.setup
    sizes = [-(-(len(a.prompt) + a.max_tokens + 8) // BLOCK) * a.num_choices + a.num_choices for a in plan.arrivals]
    fits = sum(sizes) < setup.engine["num_blocks"] * (1 - setup.engine["watermark"]) - 1
    if not evidence.is_quiet or setup.num_engines > 1 or not fits or not setup.engine["enable_prefix_caching"]:
        return
    for arrival, watched in evidence.requests():
        record = evidence.record(arrival)
        if record is None or record.get("cached_tokens") is None:
            continue
        least = 0
        for other, others in evidence.requests():
            is_over = others.ended_at + EPSILON < watched.opened_at and others.left_at is None
            if is_over and (other.tenant, other.salt) == (arrival.tenant, arrival.salt) and _finished(others):
                least = max(least, _common(arrival.prompt, other.prompt) // BLOCK * BLOCK)
        least = min(least, (len(arrival.prompt) - 1) // BLOCK * BLOCK)
        if record["cached_tokens"] < least:
            yield f"{arrival.request_id} has {record['cached_tokens']} cached tokens; {least} were there"


def _finished(watched: Watched) -> bool:
    closings = _closings(watched)
    return bool(closings) and closings[0][2]["outcome"] == "finished"


# ---------------------------------------------------------------- time, and what remains


def nothing_waits_too_long(evidence: Evidence) -> Iterator[str]:
    """Nothing waits longer than three times its quiet time and five seconds after the last fault.

    The quiet time is what everything that was asked for would take in single file.
    """
    seen = evidence.seen
    setup = seen.plan.setup
    quiet_s = 0.0
    for arrival in seen.plan.arrivals:
        passes = -(-len(arrival.prompt) // setup.engine["max_num_batched_tokens"]) + arrival.max_tokens
        quiet_s += passes * arrival.num_choices * STEP_S
    for arrival, watched in evidence.requests():
        read_s = arrival.read_pause_s * (len(watched.events) + 1)
        begins_s = max(watched.opened_at, seen.last_fault_s)
        if watched.ended_at > begins_s + 3 * quiet_s + PATIENCE_S + read_s:
            yield f"{arrival.request_id} came at {watched.opened_at:g} and ended at {watched.ended_at:g} s"
    for arrival in seen.plan.arrivals:
        asked = seen.watched.get(arrival.number)
        if asked is not None and asked.refused is not None and evidence.is_quiet:
            yield f"{arrival.request_id} was refused: {asked.refused}"


def nothing_remains(evidence: Evidence) -> Iterator[str]:
    """Once all clients are gone, the server holds nothing but its caches."""
    for what, count in evidence.seen.leftovers.items():
        yield f"{count} {what}"


Rule = Callable[[Evidence], Iterator[str]]
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        one_outcome,
        outcome_has_a_reason,
        right_texts,
        nothing_after_the_end,
        told_is_written,
        records_add_up,
        counters_agree,
        ledger_is_whole,
        cached_is_possible,
        cached_is_found,
        nothing_waits_too_long,
        nothing_remains,
    )
}
