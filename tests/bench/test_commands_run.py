"""Every benchmark runs under `--quick`, prints something and exits with 0.

The numbers are for people to judge; this file finds commands that no longer match the code that they call.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench import adapters_beside, engine_core, shapes, sse
from bench.demo_client import served
from bench.http_load import Answer
from bench.speculation import beside_vllm
from tests.bench.launched_servers import launch_servers_of
from tests.e2e.servers import COSTS
from tests.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "bench.accounting_null": "bench.accounting",
    "bench.apart.prefill_process": "bench.apart",
    "bench.sse_quipu": "bench.sse",
    "bench.sse_starlette": "bench.sse",
    "bench.timed_engine": "bench.request_budget",
    "bench.timed_server": "bench.request_budget",
    "bench.peers.thin_server": "bench.peers",
    "bench.peers.vllm_engine": "bench.engine_core",
    "bench.stalls.upstream": "bench.stalls",
}
"""Modules that are started by a command, and that command."""
COMMANDS = {
    "bench.commits": ("--jobs", "engine_core"),
    "bench.cache_stats": (),
    "bench.chat_tokens": (),
    "bench.sse": (),
    "bench.trace_replay": (),
}
COMMANDS_HERE = {
    "bench.accounting": (),
    "bench.accuracy": ("--kv-cache-dtype", "int8"),
    "bench.adapters": (),
    "bench.apart": ("--real",),
    "bench.attention": (),
    "bench.beside": (),
    "bench.cache_tree": (),
    "bench.engine_overhead": ("--executor", "fake"),
    "bench.execution": ("--format", "int4", "--activations", "int8"),
    "bench.graphs": (),
    "bench.model_table": (),
    "bench.quantized_in_vllm": ("--model", str(TINY)),
    "bench.peers": ("--format", "int8", "--peers"),  # quipu only: transformers takes ten seconds to load
    "bench.request_budget": ("--executor", "fake"),
    "bench.routing": (),
    "bench.sampling": (),
    "bench.speculation": (),
    "bench.structured": (),
    "bench.tier_trace": (),
    "bench.tiers": (),
    "bench.vllm_runner": (),
}
"""Commands that import torch or the web layer: they run in this process, which has imported both."""
DEMO_COMMANDS = ("bench.demo_model", "bench.demo_tone")
"""Commands that measure the demo model and its adapter: one server is started for both."""
TESTED_ELSEWHERE = {"bench.engine_core", "bench.sharing", "bench.stalls"}
"""Commands whose own tests run them in the same way."""
STARTING_SERVERS = ("accounting", "demo_client", "peers.servers", "quantized_in_vllm", "timed_server")
FOLDER_MADE = "bench.peers.checkpoint"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)


def is_a_command(path: Path) -> bool:
    """Return whether a module does something when it is run."""
    body = ast.parse(path.read_text("utf-8")).body
    return any(isinstance(part, ast.If) and "__main__" in ast.unparse(part.test) for part in body)


def test_every_command_is_run_here() -> None:
    """Every runnable module is in the tables above."""
    paths = [path for path in (ROOT / "bench").rglob("*.py") if is_a_command(path)]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in paths}
    assert names == {*COMMANDS, *COMMANDS_HERE, *DEMO_COMMANDS, *PARTS, *TESTED_ELSEWHERE, FOLDER_MADE}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_runs(name: str) -> None:
    """Each command exits with 0 and prints one non-empty JSON object."""
    ended = run(sys.executable, "-m", name, "--quick", "--json", *COMMANDS[name])
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report


def test_engines_are_compared() -> None:
    """One engine and two are measured in both orders, with as many streams for each engine."""
    ended = run(sys.executable, "-m", "bench.sse", "--quick", "--json", "--engines", "2")
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["streams"] == row["engines"] == 2
    assert all(row[f"{name}_events_per_s"] > 0 for name in ("one", "together", "by_turns"))
    assert row["together_ratio"] > 0 and row["by_turns_ratio"] > 0


def run_here(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run a command in this process, and undo what it changes."""
    for setting in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(setting, "1")
    monkeypatch.setattr(sys, "argv", [name, "--quick", *arguments])
    launch_servers_of(monkeypatch, *(f"bench.{name}" for name in STARTING_SERVERS))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.dict(shapes.QWEN3_06B):
            import_module(f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name).main()
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


@pytest.mark.parametrize("name", COMMANDS_HERE)
def test_command_runs_here(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command prints one non-empty JSON object."""
    run_here(monkeypatch, name, "--json", *COMMANDS_HERE[name])
    assert json.loads(capsys.readouterr().out)


def test_demo_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands print rows about the server that they are given, with the flags of the one that has the adapter."""
    flags: list[tuple[str, ...]] = []

    def serve_nothing(*asked: str) -> AbstractContextManager[str]:
        flags.append(asked)
        return nullcontext(base_url)

    launch_servers_of(monkeypatch, "bench.demo_client")
    with served("demo", "--lora-modules", "pirate=demo-pirate", *COSTS) as base_url:
        for name in DEMO_COMMANDS:
            monkeypatch.setattr(f"{name}.served", serve_nothing)
            run_here(monkeypatch, name, "--json")
            assert json.loads(capsys.readouterr().out)["rows"]
        port = int(base_url.rpartition(":")[2])
        monkeypatch.setattr(beside_vllm, "Server", lambda *_: mock.Mock(port=port))
        run_here(monkeypatch, "bench.speculation", "--json", "--beside", "quipu", "--texts", "json_sets")
        (row,) = json.loads(capsys.readouterr().out)["beside"]
        assert row["text"] == "json_sets" and row["tokens_a_pass"] >= 1 and row["ratio"] > 0
    assert flags == [("demo",), ("demo", "--lora-modules", "pirate=demo-pirate")]


def test_draft_model_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row says what a draft model is worth that is right so often, for each number of streams."""
    run_here(monkeypatch, "bench.speculation", "--json", "--draft-model", "0.8", "1.0")
    rows = json.loads(capsys.readouterr().out)["gains"]
    assert [(row["num_streams"], row["name"]) for row in rows] == [
        (streams, f"draft model, right {rate}%") for streams in (1, 2) for rate in (80, 100)
    ]
    assert all(row["tokens_a_pass"] >= 1 and row["ratio"] > 0 for row in rows)


def test_adapters_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams ask for adapters in turn, and what they are slower by is the median of the rounds but the first."""
    asked: list[list[str]] = []

    def answer_all(_: int, bodies: list[dict[str, Any]]) -> list[Answer]:
        asked.append([body["model"] for body in bodies])
        step_s = 0.5 if "a0" in asked[-1] else 0.25
        return [Answer(0.0, tuple(step_s * at for at in range(body["max_tokens"]))) for body in bodies]

    monkeypatch.setattr(adapters_beside, "Server", mock.Mock())
    monkeypatch.setattr(adapters_beside, "make_checkpoint", lambda folder: folder)
    monkeypatch.setattr(adapters_beside, "ask_all", answer_all)
    options = ("--adapters", "1", "2", "--streams", "3", "--rounds", "2", "--rank", "1")
    run_here(monkeypatch, "bench.adapters", "--json", "--beside", "quipu", *options)
    rows = json.loads(capsys.readouterr().out)["beside"]
    assert [(row["server"], row["num_adapters"], row["ratio"]) for row in rows] == [
        ("quipu", 1, 0.5),
        ("quipu", 2, 0.5),
    ]
    none, one, two = ["model"] * 3, ["a0"] * 3, ["a0", "a1", "a0"]
    assert asked == [two, one, none, none, one, two, two, one, none]


def test_shared_prefixes_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of rows that share a prefix are compared with steps of rows that have copies."""
    run_here(monkeypatch, "bench.execution", "--json", "--shared", "512", "--streams", "2", "3")
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"decode_3", "decode_3, shared", "speedup, decode_2, shared", "speedup, decode_3, shared"} <= set(rows)
    assert all(value > 0 for value in rows.values())


def test_outputs_are_valid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All outputs of the schemas that need no download are valid, or beginnings of valid ones."""
    run_here(monkeypatch, "bench.structured", "--json", "--parts", "validity")
    (found,) = json.loads(capsys.readouterr().out)["validity"]
    assert found["wrong"] == [] and found["unchecked"] == 0
    assert found["valid_share"] == 1.0 and found["ended"] > 0 and found["outputs"] == 2 * found["accepted"]
    assert found["refused"] == {"uniqueItems": 1} and found["invalid_allowed"] == 0 < found["invalid_instances"]
    assert found["valid_allowed"] == found["valid_instances"] > 0


def test_checkpoint_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made checkpoint has the files that a server needs."""
    run_here(monkeypatch, FOLDER_MADE, str(tmp_path / "tiny"))
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "tiny").iterdir()
    }


@pytest.mark.parametrize(("name", "measured"), [("bench.sse", ["bench.sse_quipu"]), ("bench.engine_core", None)])
def test_missing_peer(
    name: str, measured: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its peer, a command says so in one line and measures quipu alone."""
    started: list[str] = []

    def measure(module: str, **_: object) -> sse.Speed:
        """Replace the servers, which `test_command_runs` starts."""
        started.append(module)
        return sse.Speed(1.0, 1.0)

    monkeypatch.setattr(sse, "PEER_NEEDS", ("no_such_module",))
    monkeypatch.setattr(sse, "measure", measure)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(engine_core, "PEER", engine_core.REPOSITORY / "nowhere")
    run_here(monkeypatch, name, "--json")
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line in (sse.NO_PEER, engine_core.NO_PEER) and "is not measured" in line
    assert started == (measured or [])
    assert json.loads(output.out)["rows"][0]["ratio"] is None
