"""Rules about admissions: what stays free for those that run, and whose turn it is where tenants share an engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from tests.simulation.arrival import TOGETHER_S, Arrival
from tests.simulation.evidence import Evidence, is_afterwards
from tests.simulation.judged_passes import THAT_SPLIT_PASSES
from tests.simulation.judged_time import PROMPTLY_S

PLANNED_AHEAD = 2
"""Passes that are planned before a sequence is seen to wait."""


def _come_together(evidence: Evidence) -> bool:
    """Whether those that come to a full engine come at once: it is alone, and nothing before it holds them up."""
    has_slots = all(evidence.engine[slots] >= 16 for slots in ("encode_slots", "submit_slots"))
    return has_slots and len(evidence.seen.engines_left) == 1


def room_to_grow_is_kept(evidence: Evidence) -> Iterator[str]:
    """Beside others, nothing is admitted that leaves fewer free blocks than the watermark says."""
    least = math.ceil(evidence.engine["watermark"] * evidence.engine["num_blocks"])
    for grant in evidence.seen.passes.grants:
        are_several = grant.num_rows > 1
        if grant.admitted and are_several and grant.num_spare_blocks < least:
            yield f"{grant.admitted} were admitted beside others, and left {grant.num_spare_blocks} of {least} blocks"


def fair_turns_are_kept(evidence: Evidence) -> Iterator[str]:
    """Of tenants that began to wait together, none is served whose prompts have cost more since than another's.

    When it begins to wait, a tenant is ahead of another by what the other's last pass has cost, at most. Its turn may
    be that of a sequence which has returned to the queue, even if that waits for its blocks to be loaded.
    """
    if evidence.engine["scheduling_policy"] != "fair" or not _come_together(evidence):
        return
    passes = evidence.seen.passes
    by_name = {arrival.request_id: arrival for arrival, watched in evidence.requests() if watched.has_finished}
    asked = {sequence_id: by_name[name] for sequence_id, name in passes.request_of.items() if name in by_name}
    together = {i: one for i, one in asked.items() if is_afterwards(one) and one.at_s == TOGETHER_S}
    waiting, last, cost = dict(together), Counter[str](), Counter[str]()
    admitted_in: dict[int, list[int]] = {}
    for at, planned in enumerate(passes.planned):
        for sequence_id in planned.admitted:
            admitted_in.setdefault(sequence_id, []).append(at)
    for at, planned in enumerate(passes.planned):
        admitted = [i for i in planned.admitted if i in waiting]
        returned = {asked[i].tenant for i, ats in admitted_in.items() if i in asked and ats[0] < at < ats[-1]}
        served: set[str] = set()
        for sequence_id in admitted:
            one = waiting.pop(sequence_id)
            served.add(one.tenant)
            for other in waiting.values():
                if other.tenant in served | returned or other.is_batch != one.is_batch:
                    continue
                if cost[one.tenant] - cost[other.tenant] > last[other.tenant]:
                    name, costs = one.request_id, f"{cost[one.tenant]} and {cost[other.tenant]}"
                    yield f"{name} was served before {other.request_id}, whose tenants have cost {costs}"
        for chunk in planned.chunks:
            if chunk.sequence_id in together:
                cost[together[chunk.sequence_id].tenant] += chunk.count
            elif chunk.sequence_id in asked:
                last[asked[chunk.sequence_id].tenant] = chunk.count


def fair_shares_are_kept(evidence: Evidence) -> Iterator[str]:
    """No tenant computes more of its prompts in a pass than its share, while others wait for theirs."""
    engine, passes = evidence.engine, evidence.seen.passes
    is_alone = evidence.seen.plan.setup.num_engines == 1 and not evidence.happened("add engine")
    if engine["scheduling_policy"] != "fair" or not is_alone or evidence.happened(*THAT_SPLIT_PASSES):
        return
    tenants = {arrival.request_id: arrival.tenant for arrival, _ in evidence.requests()}
    tenant_of = {sequence_id: tenants[name] for sequence_id, name in passes.request_of.items() if name in tenants}
    admitted_in: dict[int, int] = {}
    for at, planned in enumerate(passes.planned):
        for sequence_id in planned.admitted:
            admitted_in.setdefault(sequence_id, at)
    for at, planned in enumerate(passes.planned):
        computed: Counter[str] = Counter()
        for chunk in planned.chunks:
            if chunk.sequence_id not in planned.admitted and chunk.sequence_id in tenant_of:
                computed[tenant_of[chunk.sequence_id]] += chunk.count
        if not computed:
            continue
        waiting = {
            tenant_of[sequence_id]
            for sequence_id, admitted_at in admitted_in.items()
            if sequence_id in tenant_of and passes.planned_before[sequence_id] + PLANNED_AHEAD <= at < admitted_at
        }
        share = -(-engine["max_num_batched_tokens"] // len(waiting | computed.keys()))
        for tenant, count in computed.items():
            if count > share:
                yield f"{tenant} computed {count} positions in pass {at}, of {share}, while {waiting} waited"


def batches_give_way(evidence: Evidence) -> Iterator[str]:
    """On an engine that is full of lines of batches, others are admitted at once."""
    if not _come_together(evidence):
        return
    recorded = [one for one in evidence.recorded() if is_afterwards(one[0])]
    for arrival, watched, record in recorded:
        if arrival.at_s != TOGETHER_S or arrival.is_batch or record.get("admitted_at") is None:
            continue
        before = [other for other, _, _ in recorded if other.follows == arrival.follows and not other.at_s]
        waited_s = record["admitted_at"] - record["received_at"]
        if all(other.is_batch for other in before) and waited_s > PROMPTLY_S:
            yield f"{arrival.request_id} came at {watched.opened_at:g} s and waited {waited_s:g} s for lines of batches"


def waiting_is_limited(evidence: Evidence) -> Iterator[str]:
    """Of those that come together while an engine is full, as many are turned away as may not wait, and no more."""
    limit = evidence.engine["max_waiting_requests"]
    if not limit or evidence.seen.plan.setup.drafts or not _come_together(evidence):
        return
    if any(is_afterwards(arrival) and arrival.is_batch and not arrival.at_s for arrival, _ in evidence.requests()):
        return  # lines of batches that fill it return to the queue
    share = evidence.engine["max_waiting_share"]
    of_tenant = math.ceil(limit * share)
    tokens = evidence.engine.get("max_waiting_tokens") or math.inf
    tokens_of_tenant = math.ceil(tokens * share) if tokens < math.inf else tokens
    waited: Counter[str] = Counter()
    waited_tokens: Counter[str] = Counter()
    turned_away: list[Arrival] = []
    for arrival, watched in evidence.requests():
        if is_afterwards(arrival) and arrival.at_s == TOGETHER_S:
            if watched.has_finished:
                waited[arrival.tenant] += 1
                waited_tokens[arrival.tenant] += arrival.num_prompt_tokens
            else:
                turned_away.append(arrival)
    if waited.total() > limit or max(waited.values(), default=0) > of_tenant:
        yield f"{dict(waited)} have waited; {limit} may, and {of_tenant} of each tenant"
    if waited_tokens.total() > tokens or max(waited_tokens.values(), default=0) > tokens_of_tenant:
        yield f"{dict(waited_tokens)} tokens have waited; {tokens} may, and {tokens_of_tenant} of each tenant"
    for arrival in turned_away:
        size = arrival.num_prompt_tokens
        is_number = waited.total() >= limit or waited[arrival.tenant] >= of_tenant
        are_tokens = waited_tokens.total() + size > tokens or waited_tokens[arrival.tenant] + size > tokens_of_tenant
        if not (is_number or are_tokens):
            yield f"{arrival.request_id} was turned away, and {dict(waited)} have waited, of {limit}"
