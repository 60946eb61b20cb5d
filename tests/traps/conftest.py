"""Runs the traps that open a runtime with one engine, through the router of two, and with several tokens a step."""

from __future__ import annotations

import pytest

from tests.several_engines import engines, parametrize

__all__ = ["engines"]

_OTHER_CACHE = "a prompt may go to the engine that has not computed it, which then finds nothing on its host tier"
_OTHER_BLOCK = "a prompt without a whole block to reuse may go to either engine"
NOT_BESIDE = {
    "test_left_in_the_queue": "a prompt waits only if its engine is full, and the other one is not",
    "test_over_a_warm_cache": _OTHER_BLOCK,
    "test_same_prompt_again": _OTHER_BLOCK,
    "test_equal_prompts_at_once": "prompts of one call may go to both engines, which share no step",
    "test_counted_when_it_has_come": _OTHER_CACHE,
    "test_failed_load_is_computed": _OTHER_CACHE,
    "test_messages": _OTHER_CACHE,
    "test_flipped_bits": _OTHER_CACHE,
    "test_header_of_another_block": _OTHER_CACHE,
    "test_blocks_in_the_wrong_slots": _OTHER_CACHE,
    "test_load_that_breaks_off": _OTHER_CACHE,
    "test_prompts_in_both_tiers": _OTHER_CACHE,
}
"""Tests that two engines without roles cannot run like one, and why. A pair runs them."""
NOT_APART = {
    "test_retry_after_an_engine_death": "requests of a pair outlive each engine, so none fails with it",
}
"""Tests that an engine for prefill and one for decode cannot run like one, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    parametrize(metafunc, two_engines=name not in NOT_BESIDE, several_tokens=True, apart=name not in NOT_APART)
