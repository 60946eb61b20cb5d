"""Runs the traps that open a runtime with one engine, through the router of two, and with several tokens a step."""

from __future__ import annotations

import pytest

from tests.several_engines import engines, parametrize

__all__ = ["engines"]

ONE_ENGINE = {
    "test_left_in_the_queue": "fills the only engine",
    "test_violation_is_disputed": "looks at the cache of the engine that served",
    "test_prefill_side_is_reported": "scripts the engine",
    "test_silent_prefill_side": "scripts the engine",
    "test_over_a_warm_cache": "a prompt that reads no cache may go to any engine, where nobody wrote it before",
    "test_estimate_is_marked_and_never_billed": "scripts the engine",
    "test_failed_loads": "scripts the engine",
    "test_split_of_an_engine": "scripts the engine",
    "test_same_prompt_again": "a prompt without a whole block to reuse may go to any engine",
    "test_retry_after_a_server_failure": "kills the engine that served",
    "test_ledger_keeps_the_true_numbers": "kills the engine that served",
    "test_reset_while_blocks_are_held": "looks at the blocks of the engine that served",
    "test_equal_prompts_at_once": "counts what prompts of one step compute beside each other",
    "test_counted_when_it_has_come": "looks at the host tier of the engine that served",
    "test_client_leaves_during_the_load": "looks at the host tier of the engine that served",
    "test_failed_load_is_computed": "looks at the host tier of the engine that served",
    "test_messages": "looks at the host tier of the engine that served",
    "test_flipped_bits": "looks at the host tier of the engine that served",
    "test_prompts_in_both_tiers": "fills the cache of the engine that serves",
    "test_load_that_breaks_off": "looks at the host tier of the engine that served",
    "test_header_of_another_block": "looks at the host tier of the engine that served",
    "test_blocks_in_the_wrong_slots": "looks at the host tier of the engine that served",
    "test_client_leaves_during_a_load": "looks at the host tier of the engine that served",
    "test_block_with_a_row_in_flight": "looks at the host tier of the engine that served",
}
"""Tests that need to know which engine serves, and why."""


_NO_ROLES = "its requests end with their engine, so that engines have no roles"
NOT_APART = {
    "test_complete_retries_are_billed": _NO_ROLES,
    "test_cut_short_retries_are_billed": _NO_ROLES,
    "test_key_does_not_change_the_bill": _NO_ROLES,
    "test_retry_names_the_first_request": _NO_ROLES,
    "test_retry_after_a_crash": _NO_ROLES,
    "test_billed_if_not_the_servers_fault": _NO_ROLES,
    "test_repeated_result": "the end of a prompt that fills no block is computed twice",
    "test_preempted_request_keeps_its_hit": "tells the preempted ones by their second admission",
    "test_waiting_for_blocks": "the engine for prefill has room as soon as a prompt is computed",
    "test_prompts_beside_each_other": "the other side than the one that cached a prompt loads it from the object store",
}
"""Tests of which an engine must do all, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    is_any = name not in ONE_ENGINE
    parametrize(metafunc, two_engines=is_any, several_tokens=True, apart=is_any and name not in NOT_APART)
