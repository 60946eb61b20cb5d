"""The benchmark of waiting for prefixes serves every request, in the virtual time of its passes; the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import sharing
from bench.sharing import MODES, WORKLOADS, Workload, make_engine, measure, serve
from bench.simulated import PassCosts

ROOT = Path(__file__).resolve().parents[2]
COSTS = PassCosts(step_s=0.010, token_s=20e-6)
OFF, ALWAYS, RULE = MODES


@pytest.fixture(autouse=True)
def skip_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip `quiet_collector`: nothing is timed here, and a full collection can take half a second."""
    monkeypatch.setattr(sharing, "quiet_collector", nullcontext)


def test_virtual_time() -> None:
    """Two simultaneous requests of 576 tokens take one pass, or two if the second waits for the shared prefix."""
    workload = Workload(2, 512, num_outputs=1)
    together = serve(make_engine(workload, OFF), workload, COSTS)
    assert together.num_computed == 2 * 576
    assert list(together.first_tokens.values()) == pytest.approx([0.010 + 1152 * 20e-6] * 2)
    in_turn = serve(make_engine(workload, RULE), workload, COSTS)
    assert in_turn.num_computed == 576 + 64
    assert list(in_turn.first_tokens.values()) == pytest.approx([0.010 + 576 * 20e-6, 0.020 + 640 * 20e-6])


def test_arrival_times() -> None:
    """A burst that arrives at an idle engine starts on arrival."""
    workload = Workload(1, 0, num_own=10, num_bursts=2, every_s=1.0, num_outputs=1)
    course = serve(make_engine(workload, OFF), workload, COSTS)
    assert list(course.first_tokens.values()) == pytest.approx([0.0102, 1.0102])


@pytest.mark.parametrize("workload", WORKLOADS[:15], ids=lambda workload: workload.name)
def test_rule_pays_off(workload: Workload) -> None:
    """With the costs that the rule was derived from, it computes no more, and neither the slowest nor the median first
    token is later. The one exception trades a later median for an earlier maximum and end."""
    off, rule = (measure(workload, mode, COSTS) for mode in (OFF, RULE))
    assert rule["prompt_tokens"] <= off["prompt_tokens"]
    assert rule["ttft_ms_p99"] <= off["ttft_ms_p99"]
    if (workload.burst, workload.num_shared) == (32, 32):
        assert rule["last_token_ms"] < off["last_token_ms"]
    else:
        assert rule["ttft_ms_p50"] <= off["ttft_ms_p50"]


def test_p99_of_few() -> None:
    """With few requests, the p99 is the slowest one."""
    found = measure(Workload(2, 512, num_outputs=1), RULE, COSTS)
    assert found["ttft_ms_p99"] == pytest.approx(20 + 640 * 0.02)


def test_no_sharing_no_change() -> None:
    """Prompts without a common prefix are served the same in every mode."""
    workload = Workload(4, 0, num_bursts=5, every_s=0.02, num_outputs=4)
    found = [measure(workload, mode, COSTS) for mode in MODES]
    for one in found:
        del one["step_us"]
    assert found[0] == found[1] == found[2]


def test_command_prints_json() -> None:
    """The command prints a row for each workload, with the results of each mode."""
    command = [sys.executable, "-m", "bench.sharing", "--json", "--quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert (found["step_ms"], found["token_us"]) == (10.0, 20.0)
    for row in found["rows"]:
        for mode in MODES:
            assert row[mode.name].keys() == {"prompt_tokens", "ttft_ms_p50", "ttft_ms_p99", "last_token_ms", "step_us"}
