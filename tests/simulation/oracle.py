"""Decides whether a run was right: from the plan and what clients, ledger and metrics show. No code of the server.

Each rule is a function in a module `judged_*.py` that yields violations; `RULES` lists them. A violation names the rule
and the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.simulation import (
    judged_admissions,
    judged_books,
    judged_cache,
    judged_calls,
    judged_counts,
    judged_explained,
    judged_faults,
    judged_metrics,
    judged_outcomes,
    judged_passes,
    judged_texts,
    judged_time,
)
from tests.simulation.evidence import Evidence
from tests.simulation.seen import Seen

Rule = Callable[[Evidence], Iterator[str]]
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        judged_outcomes.one_outcome,
        judged_outcomes.record_says_whose,
        judged_outcomes.retries_are_told,
        judged_outcomes.outcome_has_a_reason,
        judged_outcomes.deadlines_hold,
        judged_outcomes.drained_engine_gets_nothing,
        judged_outcomes.drains_keep_their_time,
        judged_faults.fault_is_told,
        judged_faults.incarnations_are_told,
        judged_faults.room_is_kept,
        judged_texts.right_texts,
        judged_texts.right_ids_and_scores,
        judged_texts.right_vectors,
        judged_texts.nothing_after_the_end,
        judged_calls.calls_are_right,
        judged_calls.reasoning_is_counted,
        judged_books.told_is_written,
        judged_books.records_add_up,
        judged_books.work_is_done_once,
        judged_books.moves_are_told,
        judged_books.times_are_in_order,
        judged_books.ledger_is_whole,
        judged_passes.passes_keep_their_limits,
        judged_passes.chunks_are_cut_right,
        judged_passes.the_last_give_way,
        judged_admissions.room_to_grow_is_kept,
        judged_admissions.fair_turns_are_kept,
        judged_admissions.fair_shares_are_kept,
        judged_admissions.batches_give_way,
        judged_admissions.waiting_is_limited,
        judged_passes.computed_is_what_passes_did,
        judged_metrics.counters_agree,
        judged_metrics.histograms_agree,
        judged_metrics.longest_outputs_agree,
        judged_metrics.gauges_are_at_rest,
        judged_counts.steps_are_counted,
        judged_counts.gaps_are_timed,
        judged_counts.tiers_are_counted,
        judged_counts.statistics_agree,
        judged_counts.estimates_are_possible,
        judged_counts.deaths_are_told,
        judged_counts.roles_are_kept,
        judged_cache.cached_is_possible,
        judged_cache.cached_is_found,
        judged_cache.cached_is_found_afterwards,
        judged_cache.tiers_are_told,
        judged_cache.quotas_hold,
        judged_cache.loads_are_hits,
        judged_cache.written_once,
        judged_cache.pins_are_kept,
        judged_cache.pins_hold,
        judged_explained.prompts_are_explained,
        judged_time.nothing_waits_too_long,
        judged_time.ends_are_prompt,
        judged_time.turns_are_kept,
        judged_time.nothing_remains,
    )
}


def judge(seen: Seen) -> list[str]:
    """Return everything that is wrong with a run."""
    if seen.ended_with is not None:
        return [f"the server ended: {seen.ended_with}"]
    evidence = Evidence.of(seen)
    return [f"{name}: {what}" for name, rule in RULES.items() for what in rule(evidence)]
