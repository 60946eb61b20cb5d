"""The engine's benchmark runs and prints the documented fields; its numbers are for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import engine_core, engine_jobs
from bench.engine_core import Peer, Task, make_rows, make_tasks, measure, open_peer

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import json, sys
for line in sys.stdin:
    arguments = json.loads(line)
    if arguments["job"] == "die":
        sys.exit("no such thing")
    print(json.dumps({"step_us": 3.0 * arguments["num_seqs"]}), flush=True)
"""


@contextmanager
def open_stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Peer]:
    """Open a peer that follows the real one's protocol and returns fixed numbers."""
    script = folder / "peer.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(engine_core, "PEER", Path(sys.executable))
    monkeypatch.setattr(engine_core, "PEER_SCRIPT", script)
    with open_peer() as peer:
        yield peer


def test_quick_run_prints_json() -> None:
    """Every row has its four keys; without the peer, two of them are null."""
    command = [sys.executable, "-m", "bench.engine_core", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(ran.stdout)["rows"]
    assert len(rows) == 15
    for row in rows:
        assert row.keys() == {"name", "quipu_us", "vllm_us", "ratio"}
        assert row["quipu_us"] > 0
        assert row["vllm_us"] is row["ratio"] is None


def test_row_has_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ratio is the peer's time divided by ours, from the medians of alternating rounds."""
    task = Task("step", {"num_seqs": 2}, {"step_us": "a step"})
    monkeypatch.setitem(engine_core.OURS, "step", lambda num_seqs: {"step_us": 1.5 * num_seqs})
    with open_stand_in(monkeypatch, tmp_path) as peer:
        (row,) = make_rows(task, *measure(task, peer, rounds=3))
    assert (row.name, row.quipu_us, row.vllm_us, row.ratio) == ("a step", 3.0, 6.0, 2.0)


def test_dead_peer_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the peer dies, the error quotes its output."""
    with pytest.raises(ConnectionError, match="no such thing"), open_stand_in(monkeypatch, tmp_path) as peer:
        peer.run("die", {})


def test_no_preemption_while_timed() -> None:
    """Each task has enough blocks for all that its sequences open until the last step."""
    tasks = [t for t in make_tasks(quick=False, num_steps=500, trace=None) if t.job == "step"]
    assert len(tasks) == 12
    for task in tasks:
        arguments = task.arguments
        num_positions = 2 * engine_core.BLOCK + engine_jobs.NUM_STEPS_TO_SETTLE + arguments["num_steps"]
        assert arguments["num_steps"] >= 50
        assert arguments["num_seqs"] * -(-num_positions // engine_core.BLOCK) <= arguments["num_blocks"]
