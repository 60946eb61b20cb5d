"""Which tests outside of this folder run on vLLM, and which cannot.

    QUIPU_TEST_EXECUTOR=vllm python -m pytest -n 2 $(python -m tests.vllm_runner.elsewhere)

`make test-vllm` runs this, `make test-vllm-long` the same with `--all`. Runtimes get the backends of
`fake_over_vllm.py`, servers `--executor vllm`. `tests/conftest.py` does not collect what is in `LEFT_OUT`.
"""

from __future__ import annotations

import sys

SHORT = [
    "tests/vllm_runner/test_vllm_faults.py",
    "tests/traps",
    *(
        f"tests/faults/test_{name}.py"
        for name in ("passing_faults", "resumed", "steps", "host_tier", "faulty_reports", "fault_variants")
    ),
    *(
        f"tests/actors/test_{name}.py"
        for name in ("usage", "logprobs_same", "sampling_served", "choices_served", "explained")
    ),
]
"""Counts, prices, outcomes and what survives a death."""
LONG = [
    *(
        f"tests/actors/test_{name}.py"
        for name in ("grammar_served", "logprobs_served", "prompt_scored_once", "thinking_budget_served")
    ),
    *(
        f"tests/faults/test_{name}.py"
        for name in (
            *("cut_links", "deadlines", "death_after_terminal", "leaving", "many_engines", "moved_requests"),
            *("rejoined", "reports_of_several", "router_deaths"),
        )
    ),
]
"""The rest, which differs less from one executor to another."""
LEFT_OUT: dict[str, str] = {}
"""Functions that are not run on vLLM, and why."""

if __name__ == "__main__":
    print(*SHORT, *(LONG if "--all" in sys.argv else []))
