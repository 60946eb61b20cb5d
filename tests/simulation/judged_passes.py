"""Rules about passes: how they are filled, how prompts are cut for them, and that what they did is what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from tests.simulation.arrival import BLOCK
from tests.simulation.evidence import Evidence
from tests.simulation.passes import PlannedPass

THAT_SPLIT_PASSES = ("fail passes", "no memory")
"""Faults after which rows run again, in smaller passes."""


def passes_keep_their_limits(evidence: Evidence) -> Iterator[str]:
    """No pass has more rows or positions than it may, or a sequence twice."""
    most_rows, most_positions = evidence.engine["max_num_seqs"], evidence.engine["max_num_batched_tokens"]
    for planned in evidence.seen.passes.planned:
        ids = planned.rows
        if len(set(ids)) < len(ids) or len(ids) > most_rows:
            yield f"a pass has the rows {ids}, and may have {most_rows}"
        if planned.num_positions > most_positions:
            yield f"a pass has {planned.num_positions} positions, and may have {most_positions}"


@attrs.define
class _Known:
    """What an engine has of a sequence."""

    num_tokens: int
    """Those that were known when it was admitted."""
    num_planned: int
    num_blocks: int = 0


def chunks_are_cut_right(evidence: Evidence) -> Iterator[str]:
    """Chunks of a sequence follow each other, have just the blocks they need, and are no shorter than they must be."""
    if evidence.happened(*THAT_SPLIT_PASSES):
        return
    known: dict[tuple[int, int], _Known] = {}
    may_be_short = (
        evidence.engine["scheduling_policy"] == "fair"  # then tenants have shares of a pass
        or evidence.seen.plan.setup.drafts  # and here rows that go on may take more than one position
        or bool(evidence.metric("num_preemptions_total"))  # which empty a pass after it was filled
    )
    for planned in evidence.seen.passes.planned:
        for sequence_id, admitted in planned.admitted.items():
            start = admitted.num_cached_blocks * BLOCK
            known[planned.engine, sequence_id] = _Known(admitted.num_tokens, start)
        yield from _chunks(evidence, planned, known, may_be_short=may_be_short)
        for sequence_id in planned.going_on:
            one = known[planned.engine, sequence_id]
            if one.num_planned < one.num_tokens:
                yield f"sequence {sequence_id} goes on with {one.num_planned} of {one.num_tokens} tokens"


def _chunks(
    evidence: Evidence, planned: PlannedPass, known: dict[tuple[int, int], _Known], *, may_be_short: bool
) -> Iterator[str]:
    most_positions = evidence.engine["max_num_batched_tokens"]
    for chunk in planned.chunks:
        one = known[planned.engine, chunk.sequence_id]
        if chunk.start != one.num_planned or not chunk.start < chunk.end <= one.num_tokens:
            yield f"{chunk} follows {one.num_planned} of {one.num_tokens} tokens"
        one.num_planned = chunk.end
        one.num_blocks += planned.num_new_blocks.get(chunk.sequence_id, 0)
        if one.num_blocks != -(-chunk.end // BLOCK):
            yield f"{chunk} has {one.num_blocks} blocks"
        longest = evidence.engine["long_prefill_token_threshold"]
        if longest and chunk.count > longest and len(planned.rows) > 1:
            yield f"{chunk} has {chunk.count} positions beside others, and may have {longest}"
        is_longest = chunk.count == longest
        is_short = chunk.end < one.num_tokens and planned.num_positions < most_positions and not is_longest
        if is_short and not may_be_short:
            yield f"{chunk} of {one.num_tokens} tokens ends in a pass of {planned.num_positions} positions"


def the_last_give_way(evidence: Evidence) -> Iterator[str]:
    """No sequence is preempted while one that is less urgent, or as urgent and came later, keeps its blocks."""
    if evidence.engine["scheduling_policy"] == "fair" or not evidence.keeps_cache or evidence.seen.crashed:
        return
    by_name = {arrival.request_id: arrival for arrival, _ in evidence.requests()}
    by_priority, seen = evidence.engine["scheduling_policy"] == "priority", evidence.seen.passes

    def rank(sequence_id: int) -> tuple[bool, int, int]:
        arrival = by_name[seen.request_of[sequence_id]]
        return arrival.is_batch, arrival.priority if by_priority else 0, seen.turn_of[sequence_id]

    passes: dict[int, list[PlannedPass]] = {}
    numbers: dict[int, list[int]] = {}
    """The places of an engine's passes among those of all engines."""
    for number, planned in enumerate(seen.planned):
        passes.setdefault(planned.engine, []).append(planned)
        numbers.setdefault(planned.engine, []).append(number)
    for engine, planned_there in passes.items():
        last: dict[int, int] = {}
        """The last pass in which a sequence had a row."""
        for at, planned in enumerate(planned_there):
            for sequence_id in planned.admitted:
                if (left_at := last.get(sequence_id)) is None:
                    continue
                after = planned_there[left_at + 1]
                kept = [i for i in after.rows if last.get(i, -1) >= left_at and i not in after.admitted]
                # when they came is not known of those that were submitted again since, to go on elsewhere
                kept = [i for i in kept if seen.planned_before[i] <= numbers[engine][left_at + 1]]
                if wrong := [other for other in kept if rank(sequence_id) < rank(other)]:
                    yield f"sequence {sequence_id} was preempted after pass {left_at}, and {wrong} were not"
            last.update(dict.fromkeys(planned.rows, at))


def computed_is_what_passes_did(evidence: Evidence) -> Iterator[str]:
    """Records count what passes have computed: no more than that, and all of it where no engine was disturbed."""
    passes, is_all = evidence.seen.passes, evidence.keeps_cache and not evidence.metric("num_preemptions_total")
    again_read: Counter[int] = Counter()
    first_read: dict[int, int] = {}
    for planned in passes.planned:
        for sequence_id, admitted in planned.admitted.items():
            first_read.setdefault(sequence_id, admitted.num_cached_blocks * BLOCK)
            again_read[sequence_id] += (admitted.num_cached_blocks + 1) * BLOCK  # perhaps and a part of one
    own: dict[str, list[int]] = {}
    for sequence_id, request_id in passes.request_of.items():
        own.setdefault(request_id, []).append(sequence_id)
    for arrival, watched, record in evidence.recorded():
        of_prompts = at_first = again = may_be_read = 0
        for place, sequence_id in enumerate(sorted(own.get(arrival.request_id, ()))):
            spans = passes.spans.get(sequence_id, [])
            once = {at for start, end in spans for at in range(start, end)}
            num_prompt_tokens = len(arrival.parts[place // arrival.num_choices].prompt)
            of_prompts += sum(at < num_prompt_tokens for at in once)
            # the rest was read before, perhaps by the engine that computed the prompt
            at_first += sum(first_read.get(sequence_id, 0) <= at < num_prompt_tokens for at in once)
            again += sum(end - start for start, end in spans) - len(once)
            may_be_read += again_read[sequence_id]
        name, computed, recomputed = (
            arrival.request_id,
            record.get("computed_tokens", 0),
            record.get("recomputed_tokens", 0),
        )
        is_known = is_all and watched.has_finished
        if computed > of_prompts or (is_known and computed < at_first):
            yield f"{name} has {computed} computed tokens, passes have computed {of_prompts}"
        if recomputed > again + may_be_read or (is_known and recomputed < again):
            yield f"{name} has {recomputed} recomputed tokens, passes have computed {again} again"
