"""The `quipu` command as users run it: its output, and its exit code if it cannot serve."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

import quipu
from tests.e2e.servers import PATIENCE_S, QUIPU, Server, has_torch, run_quipu, serve_command
from tests.e2e.terminals import CTRL_C, on_a_terminal
from tests.tiny import TINY


def test_version_and_help(tmp_path: Path) -> None:
    """The version is the package's; help lists the flags for users, and no internal ones."""
    said = subprocess.run([QUIPU, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.stdout == f"quipu {quipu.__version__}\n"
    help_text = run_quipu("serve", "--help", folder=tmp_path).stdout
    for flag in ("--host", "--port", "--num-blocks", "--max-model-len", "--shutdown-timeout", "--executor"):
        assert flag in help_text
    assert "poison" not in help_text


def test_empty_folder(fake: Server) -> None:
    """Serving needs no files in the working directory: these servers run in empty ones."""
    assert fake.get("/v1/models").json()["data"][0]["id"] == "demo"


def bad_checkpoint(folder: Path, what: str) -> Path:
    """Copy the tiny checkpoint with one defect."""
    shutil.copytree(TINY, folder / "model")
    model = folder / "model"
    if what == "architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysForCausalLM"]}))
    elif what == "weights":
        (model / "model.safetensors").write_bytes(b"no safetensors at all")
    else:
        (model / what).unlink()
    return model


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("architecture", "NobodysForCausalLM"),
        ("weights", "model.safetensors"),
        ("tokenizer.json", "tokenizer.json"),
        ("config.json", "config.json"),
    ],
)
def test_invalid_checkpoint(tmp_path: Path, what: str, message: str) -> None:
    """The command exits with an error that names the problem; it does not retry."""
    model = bad_checkpoint(tmp_path, what)
    ended = run_quipu("serve", str(model), "--port", "0", folder=tmp_path)
    assert ended.returncode in (1, 2)
    complaints = [line for line in ended.stderr.splitlines() if line.startswith("quipu: ")]
    assert message in complaints[0] and "Traceback" not in ended.stderr
    assert ended.stderr.count("engine.died") <= 1


def test_port_in_use(fake: Server, tmp_path: Path) -> None:
    """If the port is in use, the command exits with an error that names it."""
    port = fake.address[1]
    ended = run_quipu(*serve_command("--executor", "fake", "--port", str(port)), folder=tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr and "in use" in ended.stderr


def test_context_exceeds_cache(tmp_path: Path) -> None:
    """A context that the KV cache cannot hold is rejected at once, naming the flags."""
    ended = run_quipu(*serve_command("--max-model-len", "4096", "--num-blocks", "10"), folder=tmp_path)
    assert ended.returncode == 2 and "--max-model-len 4096" in ended.stderr and "Traceback" not in ended.stderr


def test_cross_site_requests(fake: Server) -> None:
    """By default a server responds only to loopback host names, and not to pages of other sites."""
    cases: tuple[tuple[dict[str, str], int], ...] = (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Origin": "https://site.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    )
    for headers, status in cases:
        assert httpx.get(f"{fake.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == status, headers


def test_start_on_a_terminal(tmp_path: Path) -> None:
    """Every line is plain text, even of the engine process, and the last one is the URL to open; Ctrl-C ends it.

    Only the engine loads torch.
    """
    command = [str(QUIPU), "serve", "demo", "--port", "0", "--data-dir", str(tmp_path / "data")]
    with on_a_terminal(*command) as user:
        lines = (user.read_until("/ui\r\n")).splitlines()
        assert lines[-1].startswith("ready: http://127.0.0.1:")
        assert any("the cpu executor runs on" in line for line in lines)  # a line of the engine process
        assert not [line for line in lines if line.startswith("{")]
        server = Server(user.process, tmp_path, lines[-1].removeprefix("ready: ").removesuffix("/ui"))
        assert server.complete("torch").status_code == 200
        assert not has_torch(server.pid) and has_torch(server.engine_pid())
        user.type(CTRL_C)
        user.read_until("server.stopping")
