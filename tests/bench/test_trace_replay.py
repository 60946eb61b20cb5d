"""The replay finds the same blocks in a trace as two models that share no code with quipu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.trace_replay import Setting, TracedRequest, read_trace, replay
from tests.bench.lru_model import hits_with_lru, hits_without_limit
from tests.bench.traces import Row, traces, write_trace

BLOCK = 4
ROOT = Path(__file__).resolve().parents[2]


def requests_of(rows: list[Row]) -> list[TracedRequest]:
    return [TracedRequest(r.timestamp / 1000, r.input_length, r.output_length, r.hash_ids) for r in rows]


def run(rows: list[Row], capacity: int | None, **changes: Any) -> dict[str, Any]:
    setting = Setting(
        **{
            "capacity": capacity,
            "block_tokens": BLOCK,
            "sequential": True,
            "decode_outputs": False,
            "max_num_batched_tokens": 2 * BLOCK + 1,
            **changes,
        }
    )
    return replay(requests_of(rows), setting)


@given(rows=traces(BLOCK))
def test_unlimited_hits(rows: list[Row]) -> None:
    """Without eviction, hits follow from the ids alone."""
    found = run(rows, None)
    assert found["hit_blocks"] == hits_without_limit(rows, BLOCK)
    assert found["hit_tokens"] == found["hit_blocks"] * BLOCK
    assert found["query_blocks"] == sum(r.input_length // BLOCK for r in rows)
    assert found["prompt_tokens"] == sum(r.input_length for r in rows)
    assert (found["rejected"], found["preemptions"]) == (0, 0)


@given(rows=traces(BLOCK), capacity=st.integers(4, 30), decode_outputs=st.booleans())
def test_limited_hits(rows: list[Row], capacity: int, decode_outputs: bool) -> None:
    """The same blocks are evicted as in the LRU model, in both output modes; requests that cannot fit are rejected."""
    found = run(rows, capacity, decode_outputs=decode_outputs)
    assert (found["hit_blocks"], found["rejected"]) == hits_with_lru(rows, BLOCK, capacity)


@given(rows=traces(BLOCK), capacity=st.integers(4, 30), max_num_seqs=st.integers(1, 8), share=st.booleans())
def test_concurrent_replay(rows: list[Row], capacity: int, max_num_seqs: int, share: bool) -> None:
    """All requests that fit are served, preempted or not, and none finds more than was ever computed."""
    changes = {"max_num_seqs": max_num_seqs, "share_pending_prefixes": share, "watermark": 0.1 * share}
    found = run(rows, capacity, sequential=False, decode_outputs=True, **changes)
    fitting = [r for r in rows if r.input_length + r.output_length <= capacity * BLOCK]
    assert found["rejected"] == len(rows) - len(fitting)
    assert found["query_blocks"] == sum(r.input_length // BLOCK for r in fitting)
    assert found["hit_blocks"] <= hits_without_limit(fitting, BLOCK)
    assert found["most_running"] <= max_num_seqs


def test_virtual_time() -> None:
    """A pass costs a step and its positions; the first one starts when its request arrives."""
    rows = [Row(2000, 2 * BLOCK, 3, [0, 1])]
    found = run(rows, 10, sequential=False, decode_outputs=True, max_num_batched_tokens=64)
    assert found["steps"] == 3
    assert found["virtual_seconds"] == pytest.approx(2 + 3 * 0.010 + (2 * BLOCK + 2) * 20e-6, abs=1e-3)


def test_last_block_is_computed() -> None:
    """At least one token of a fully cached prompt is computed."""
    rows = [Row(0, 3 * BLOCK, 1, [0, 1, 2])] * 3
    assert run(rows, 10)["hit_blocks"] == 4


def test_malformed_line(tmp_path: Path) -> None:
    """An error in a trace names the file and the line."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


@pytest.mark.parametrize("arguments", [["--capacity", "inf", "--sequential"], ["--capacity", "12", "--limit", "2"]])
def test_command_prints_json(tmp_path: Path, arguments: list[str]) -> None:
    """The command prints the documented keys."""
    rows = [Row(0, 9, 4, [0, 1, 2]), Row(1, 13, 2, [0, 1, 3, 4]), Row(2, 5, 1, [0, 5])]
    path = write_trace(tmp_path / "trace.jsonl", rows)
    command = [sys.executable, "-m", "bench.trace_replay", str(path), "--block-tokens", "4", "--json", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["requests"] == (2 if "--limit" in arguments else 3)
    assert {
        "requests",
        "rejected",
        "prompt_tokens",
        "query_blocks",
        "hit_blocks",
        "hit_tokens",
        "seconds",
        "blocks_per_second",
        "step_us_p50",
        "step_us_p99",
        "preemptions",
    } <= found.keys()
