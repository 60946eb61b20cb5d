"""`quipu bench serve` against a real server: its numbers match the server's for every dataset."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.e2e.servers import PATIENCE_S, QUIPU, Server, eventually, full_blocks, run_quipu

CACHED = 'cached_tokens_total{tier="device"}'


@attrs.frozen
class Measured:
    """The client's report, and the increase of the server's counters meanwhile."""

    report: dict[str, Any]
    rise: dict[str, float]


def measure(server: Server, *flags: str) -> Measured:
    before = server.wait_at_rest()
    ended = run_quipu("bench", "serve", "--base-url", server.url, "--json", *flags)
    assert ended.returncode == 0, ended.stderr
    after = server.wait_at_rest()
    return Measured(json.loads(ended.stdout), {name: value - before.get(name, 0) for name, value in after.items()})


def assert_agrees(measured: Measured) -> None:
    """Assert that nothing failed, and that prompt, cached and output tokens match the server's counters."""
    report, rise = measured.report, measured.rise
    assert (report["failed"], report["skipped"]) == (0, 0), report["errors"]
    assert report["usage_available"] is True
    assert report["total_input_tokens"] == rise["prompt_tokens_total"]
    assert report["total_cached_tokens"] == rise[CACHED]
    assert report["total_output_tokens"] == rise["generation_tokens_total"]
    assert report["cache_hit_rate"] == report["total_cached_tokens"] / report["total_input_tokens"]
    assert report["completed"] == rise['requests_total{outcome="finished"}']
    assert 0 < report["mean_ttft_ms"] <= report["p99_ttft_ms"] < report["duration"] * 1000
    assert report["mean_ttft_ms"] < report["mean_e2el_ms"]


def trace_file(folder: Path) -> Path:
    """Write three requests: the second shares two blocks of 512 tokens with the first, the third is equal to it."""
    rows = [(0, 1100, [5, 6, 7]), (100, 1500, [5, 6, 8]), (300, 1100, [5, 6, 7])]
    path = folder / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 4, "hash_ids": ids})
            for at, length, ids in rows
        )
    )
    return path


def test_random(fake: Server) -> None:
    """Prompts have the requested length and share nothing, so nothing hits; outputs have the requested length."""
    flags = ("--num-prompts", "12", "--random-input-len", "50", "--random-output-len", "6", "--ignore-eos")
    measured = measure(fake, *flags, "--seed", "101", "--request-rate", "100", "--num-warmups", "0")
    assert_agrees(measured)
    report = measured.report
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (12 * 50, 12 * 6)
    assert (report["total_cached_tokens"], report["cache_hit_rate"]) == (0, 0.0)


def test_shared_prefix(fake: Server) -> None:
    """Without concurrency, all but the first prompt of each prefix hit all its full blocks."""
    prefixes = ("--shared-prefix-num-prefixes", "3", "--shared-prefix-prefix-len", "70")
    flags = (*prefixes, "--shared-prefix-suffix-len", "20", "--shared-prefix-output-len", "3", "--num-prompts", "12")
    measured = measure(fake, "--dataset-name", "shared-prefix", *flags, "--seed", "102", "--max-concurrency", "1")
    assert_agrees(measured)
    assert measured.report["total_cached_tokens"] == (12 - 3) * full_blocks(70)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_multi_turn(fake: Server, endpoint: str) -> None:
    """Each later turn hits at least the previous prompt, with which it starts."""
    flags = ("--endpoint", endpoint, "--num-prompts", "3", "--multi-turn-num-turns", "3", "--random-input-len", "60")
    measured = measure(fake, "--dataset-name", "multi-turn", *flags, "--random-output-len", "20", "--seed", "103")
    assert_agrees(measured)
    assert measured.report["completed"] == 9
    assert measured.report["cache_hit_rate"] > 0.3


def test_trace(fake: Server, tmp_path: Path) -> None:
    """No request is sent before its timestamp; equal hash ids make equal blocks, and all full ones hit."""
    path = trace_file(tmp_path)
    saved = tmp_path / "result.json"
    flags = ("--dataset-path", str(path), "--save-result", str(saved), "--save-detailed", "--seed", "104")
    measured = measure(fake, "--dataset-name", "trace", *flags)
    assert_agrees(measured)
    rows = json.loads(saved.read_text())["requests"]
    assert [row["prompt_tokens"] for row in rows] == [1100, 1500, 1100]
    assert [row["cached_tokens"] for row in rows] == [0, 1024, full_blocks(1099)]
    assert all(row["start_s"] >= due_s for row, due_s in zip(rows, (0.0, 0.1, 0.3), strict=True))
    assert measured.report["duration"] < PATIENCE_S


def test_custom(fake: Server, tmp_path: Path) -> None:
    """Rows are sent unchanged; one that the server rejects is counted with the server's message."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "What is tied into a quipu?"}], "max_tokens": 5},
        {"prompt": "And who reads it?", "max_tokens": 5},
        {"prompt": "x " * 20_000, "max_tokens": 5},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--endpoint", "/v1/chat/completions", "--dataset-name", "custom", "--dataset-path", str(path))
    measured = measure(fake, *flags)
    report = measured.report
    assert (report["completed"], report["failed"]) == (2, 1)
    (error,) = report["errors"]
    assert error["kind"] == "http_400"
    assert "context" in error["example"] or "tokens" in error["example"]
    assert report["total_input_tokens"] == measured.rise["prompt_tokens_total"]


def test_interrupted(fake: Server) -> None:
    """Ctrl-C ends the client immediately with a message, and the server leaks nothing."""
    fake.wait_at_rest()
    flags = ("--num-prompts", "4", "--random-output-len", "4000", "--ignore-eos")
    command = [QUIPU, "bench", "serve", "--base-url", fake.url, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    eventually(lambda: fake.metrics()["open_accounts"] == 4, "four requests are running")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert output == ""
    fake.wait_at_rest()
