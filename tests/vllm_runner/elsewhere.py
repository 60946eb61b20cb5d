"""Which tests outside of this folder run on vLLM, and which cannot.

    QUIPU_TEST_EXECUTOR=vllm python -m pytest -n 2 --dist loadfile $(python -m tests.vllm_runner.elsewhere)

`make test-vllm` runs this, `make test-vllm-long` the same with `--all`. Runtimes get the backends of
`fake_over_vllm.py`, servers `--executor vllm`. `tests/conftest.py` does not collect what is in `LEFT_OUT`.

With VLLM_USE_V2_MODEL_RUNNER=1 and TRITON_INTERPRET=1 those that start no server run on vLLM's runner for GPUs, in the
interpreter (`v2_stand_ins.py`), many times slower.
"""

from __future__ import annotations

import sys


def _files(folder: str, names: str) -> list[str]:
    return [f"{folder}/test_{name}.py" for name in names.split()]


SHORT = [
    "tests/vllm_runner/test_vllm_faults.py",
    "tests/e2e/test_client_usage.py",
    "tests/traps",
    *_files("tests/faults", "passing_faults resumed steps host_tier faulty_reports fault_variants"),
    *_files("tests/actors", "usage logprobs_same sampling_served choices_served explained"),
]
"""Counts, prices, outcomes and what survives a death."""
LONG = [
    *_files("tests/e2e", "anthropic_client client_logprobs client_outputs seeds typed_outputs usage_counters"),
    *_files("tests/actors", "grammar_served logprobs_served prompt_scored_once thinking_budget_served"),
    *_files("tests/actors/engine", "host_tier_on_cpu"),
    *_files("tests/faults", "cut_links deadlines death_after_terminal leaving many_engines moved_requests rejoined"),
    *_files("tests/faults", "reports_of_several router_deaths"),
]
"""The rest, which differs less from one executor to another."""
LEFT_OUT: dict[str, str] = {
    "test_same_tokens_from_the_host[int8]": "the vllm executor keeps no int8 KV cache",
    "test_reloaded_under_its_name": "the vllm executor applies no adapters",
    "test_nothing_of_it_is_found_or_billed": "the vllm executor verifies no drafts",
    "test_numbers_are_those_without": "likewise",
    "test_tier_leaves_the_cache_no_memory": "the backend of these tests was loaded before",
}
"""Tests that are not run on vLLM, by function or by name with parameters, and why.

Files in neither list do not compute: actors of the web process, files of checkpoints, refused bodies. Steps with
several tokens a row (`tests/several_engines.py`) are the fake backend's alone.
"""

if __name__ == "__main__":
    print(*SHORT, *(LONG if "--all" in sys.argv else []))
