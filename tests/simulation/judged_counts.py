"""Rules about what is counted beside the records: steps and their gaps, tiers, statistics, estimates, deaths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tests.simulation.arrival import BLOCK
from tests.simulation.evidence import Evidence, Record, common, is_afterwards

EPSILON_S = 1e-6
WINDOW_S = 3600.0
"""What the figures of the cache cover."""
STORED_TOGETHER = 32
"""Blocks of the stores that are under way at a time."""
OF_COPIES = frozenset({"disk full", "writes fail", "short writes", "syncs fail", "clock step", "repeat report"})
"""Faults that no copy of a block notices."""


def _is_given_up(evidence: Evidence) -> bool:
    """Whether the accountant may have given up a request, with the numbers that it had."""
    return sum(point.actor == "accountant" for point in evidence.seen.crashed) >= 2


def steps_are_counted(evidence: Evidence) -> Iterator[str]:
    """Each report of an engine is counted once, and each sequence that had to give way."""
    passes = evidence.seen.passes
    if not evidence.keeps_cache:
        return
    found = evidence.metric("engine_steps_total")
    if found != len(passes.reports):
        yield f"{found:g} steps are counted, and engines have reported {len(passes.reports)}"
    preempted, found = sum(grant.num_preempted for grant in passes.grants), evidence.metric("num_preemptions_total")
    lines = {
        i for arrival, _ in evidence.requests() if arrival.is_batch for i in passes.sequences_of(arrival.request_id)
    }
    gave_way = sum(sequence_id in lines for planned in passes.planned for sequence_id in planned.admitted)  # at most
    if not preempted <= found <= preempted + gave_way:
        yield f"{found:g} preemptions are counted, and {preempted} sequences were preempted"
    if evidence.is_quiet:
        for name in ("stale_frames_total", "requests_resumed_total"):
            if evidence.metric(name):
                yield f"{name} is {evidence.metric(name):g}, and nothing has happened"


def gaps_are_timed(evidence: Evidence) -> Iterator[str]:
    """Between two tokens of a sequence there is one gap, as long as from the one to the other."""
    passes = evidence.seen.passes
    if not evidence.keeps_cache or _is_given_up(evidence):
        return
    least = most = 0
    least_s = most_s = 0.0
    for times in passes.token_times.values():
        most, most_s = most + len(times) - 1, most_s + times[-1] - times[0]
    for arrival, watched in evidence.requests():
        if watched.has_finished:
            for output, sequence_id in enumerate(passes.sequences_of(arrival.request_id)):
                times = passes.token_times.get(sequence_id, [])[: evidence.answer(arrival, output).num_tokens]
                if times:
                    least, least_s = least + len(times) - 1, least_s + times[-1] - times[0]
    count, sum_s = (evidence.metric(f"inter_token_latency_seconds_{what}") for what in ("count", "sum"))
    if not least <= count <= most:
        yield f"{count:g} gaps between tokens are timed, there were {least} to {most}"
    if evidence.is_quiet and not least_s - EPSILON_S <= sum_s <= most_s + EPSILON_S:
        yield f"gaps between tokens took {sum_s:g} s, they were {least_s:g} to {most_s:g} s"


def tiers_are_counted(evidence: Evidence) -> Iterator[str]:
    """What a tier holds is what was stored there and not evicted; without a fault of copies, no load fails."""
    setup, seen = evidence.seen.plan.setup, evidence.seen
    for tier in setup.tiers:
        stored, evicted = (evidence.metric(f"kv_tier_{what}_blocks_total", tier=tier) for what in ("stored", "evicted"))
        used = evidence.metric("kv_tier_blocks", tier=tier, state="used")
        is_own = tier != "remote" and evidence.keeps_cache and not seen.resets
        # places are taken before a store, which is told with the next step's report; on a disk, some are stored again
        taken = used - (stored - evicted)
        if is_own and ((taken < 0 and tier == "host") or taken > STORED_TOGETHER * len(seen.engines_left)):
            yield f"{used:g} blocks are in {tier}, {stored:g} were stored there and {evicted:g} evicted"
        sizes: Counter[str] = Counter()
        for sample in evidence.samples.get("kv_tier_blocks", ()):
            if sample.labels["tier"] == tier == "host":
                sizes[sample.labels.get("engine", "")] += int(sample.value)
        for engine, size in sizes.items():
            if size not in (0, setup.host_blocks):  # 0: it has never run a step
                yield f"{size} blocks of {tier} are shown of engine {engine!r}, of {setup.host_blocks}"
        failed = evidence.metric("kv_tier_failed_load_blocks_total", tier=tier)
        wrong = evidence.metric("kv_tier_failed_load_blocks_total", tier=tier, reason="corrupt")
        if wrong != (corrupt := evidence.metric("kv_tier_corrupt_total", tier=tier)):
            yield f"{corrupt:g} blocks of {tier} were corrupt, and {wrong:g} loads failed for that"
        is_undisturbed = tier != "remote" and evidence.keeps_cache and not seen.crashed
        if failed and is_undisturbed and all(fault.kind in OF_COPIES for fault in seen.happened):
            yield f"{failed:g} blocks could not be loaded from {tier}, and no copy was disturbed"


def _sums(records: Iterable[Record]) -> dict[str, int]:
    """Return what statistics say of these requests, if they are right."""
    admitted = [record for record in records if record.get("prompt_tokens") is not None]
    return {
        "requests": len(admitted),
        "hits": sum(bool(record["cached_tokens"]) for record in admitted),
        "prompt_tokens": sum(record["prompt_tokens"] for record in admitted),
        "cached_tokens": sum(record["cached_tokens"] for record in admitted),
    }


def statistics_agree(evidence: Evidence) -> Iterator[str]:
    """The statistics of the cache, in all and of each tenant and model, are the sums over the records."""
    seen = evidence.seen
    if _is_given_up(evidence):
        return
    records = [found[0] for found in evidence.records.values()]
    wanted: dict[str, Any] = _sums(records)
    for tier in ("host", "disk", "remote"):
        wanted[f"{tier}_tokens"] = sum(record.get(f"cached_{tier}_tokens") or 0 for record in records)
    if seen.statistics != wanted:
        yield f"the statistics are {seen.statistics}, the records say {wanted}"
    if seen.virtual_s > WINDOW_S:
        return
    by_row: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.get("prompt_tokens") is not None:
            by_row.setdefault((record["tenant"], record["model"]), []).append(record)
    rows = {row: _sums(its) for row, its in by_row.items()}
    shown_rows = {row: sums for row, sums in seen.cache_rows.items() if any(sums.values())}
    if shown_rows != rows:
        yield f"the cache was used as {shown_rows}, the records say {rows}"
    ratio = wanted["cached_tokens"] / wanted["prompt_tokens"] if wanted["prompt_tokens"] else 0.0
    if abs((shown := evidence.metric("cache_window_hit_ratio")) - ratio) > EPSILON_S:
        yield f"{shown:g} of the prompts' tokens are said to have been cached, the records say {ratio:g}"


def estimates_are_possible(evidence: Evidence) -> Iterator[str]:
    """A router expects no more than its tenant has sent; the error is that to what was found."""
    counts, errors = [0, 0], [0, 0]
    for arrival, watched, record in evidence.recorded():
        estimate, cached = record.get("router_estimate_tokens"), record.get("cached_tokens") or 0
        if estimate is None:
            if arrival.further:  # some of its prompts may have been estimated
                counts[1] += len(arrival.parts)
                errors[1] += arrival.num_prompt_tokens + cached
            continue
        admitted_s = watched.opened_at + record["admitted_at"] - record["received_at"]
        earlier = [
            other
            for other, others in evidence.requests()
            if others.opened_at <= admitted_s + EPSILON_S and evidence.domain(other) == evidence.domain(arrival)
        ]
        most = 0
        for part in arrival.parts:
            beside = (ids for other in earlier for ids in _sequences(evidence, other, part.number, part.part))
            most += max((common(part.prompt, ids) for ids in beside), default=0) // BLOCK * BLOCK
        if estimate > most or estimate % BLOCK:
            yield f"{arrival.request_id} was expected to find {estimate} tokens; at most {most} were ever there"
        counts[0] += len(arrival.parts) if watched.has_finished else 1
        counts[1] += len(arrival.parts)
        errors[0] += abs(estimate - cached)
        errors[1] += estimate + cached if arrival.further else abs(estimate - cached)
    if _is_given_up(evidence):
        return
    for what, (least, most) in (("count", counts), ("sum", errors)):
        if not least <= (found := evidence.metric(f"router_overlap_error_tokens_{what}")) <= most:
            yield f"the {what} of routers' errors is {found:g}, the records say {least} to {most}"


def _sequences(evidence: Evidence, other: Any, number: int, part: int) -> Iterator[tuple[int, ...]]:
    """Yield what a request has sent or got, but for one of its prompts."""
    if other.number != number:
        yield from evidence.computed(other)
        return
    yield from (one.prompt for one in other.parts if one.part != part)


def deaths_are_told(evidence: Evidence) -> Iterator[str]:
    """A record names no more deaths of its engines than there were while it was open."""
    for arrival, watched, record in evidence.recorded():
        closed_s = watched.opened_at + record["closed_at"] - record["received_at"]
        most = sum(watched.opened_at - EPSILON_S <= at <= closed_s + EPSILON_S for at in evidence.seen.deaths)
        if not evidence.happened("clock step") and record.get("engine_deaths", 0) > most:
            yield f"{arrival.request_id} has seen {record['engine_deaths']} engines die, there were {most}"


def roles_are_kept(evidence: Evidence) -> Iterator[str]:
    """Prompts are computed by engines that are for that, but for what others compute themselves."""
    engine = evidence.engine
    if not engine.get("has_peers") or evidence.happened("change role", "add engine", "drain engine"):
        return
    if not engine["enable_prefix_caching"]:
        return  # then no block has a key by which it could be fetched
    roles: dict[int, str] = dict(enumerate(engine["engine_roles"]))
    shown = Counter[tuple[str, str]]()
    for sample in evidence.samples.get("engine_role", ()):
        shown[sample.labels.get("engine", "0"), sample.labels["role"]] += int(sample.value)
    if shown != Counter({(str(number), role): 1 for number, role in roles.items()}):
        yield f"engines are shown as {dict(shown)}, they are {roles}"
    for arrival, watched, record in evidence.recorded():
        if arrival.further or not watched.has_finished or record.get("engine") is None:
            continue
        if not (evidence.is_quiet or is_afterwards(arrival)):
            continue  # others stand in for engines that are gone
        num_tokens, at, then = len(arrival.prompt), roles[record["engine"]], record.get("decode_engine")
        name, has_more = arrival.request_id, not arrival.is_embedded and arrival.max_tokens > 1
        is_new = not arrival.reads_cache or not any(
            common(arrival.prompt, ids) >= BLOCK
            for other, _ in evidence.requests()
            if other.number != arrival.number and evidence.domain(other) == evidence.domain(arrival)
            for ids in evidence.computed(other)
        )
        is_short = num_tokens <= engine["prefill_local_tokens"] or (arrival.reads_cache and num_tokens <= BLOCK)
        if then is not None and roles[then] == "prefill":
            yield f"{name} was continued by engine {then}, which is for prompts"
        if has_more and is_short and at == "prefill":
            yield f"{name} has {num_tokens} tokens, and was computed by engine {record['engine']}, which is for prompts"
        if (not has_more or (is_new and not is_short)) and at == "decode":
            yield f"{name} has {num_tokens} tokens, and was computed by engine {record['engine']}, which goes on"
