"""The `quipu` command as its users meet it: what it says, and how it ends when it cannot serve."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

import quipu
from quipu.actors.shared.checkpoint import DEMO
from tests.e2e.servers import PATIENCE_S, QUIPU, Server, has_torch, run_quipu


def test_version_and_help(tmp_path: Path) -> None:
    """The version is the package's; help names every flag that is for users, and none that is not."""
    said = subprocess.run([QUIPU, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.stdout == f"quipu {quipu.__version__}\n"
    help_text = run_quipu("serve", "--help", folder=tmp_path).stdout
    for flag in ("--host", "--port", "--num-blocks", "--max-model-len", "--shutdown-timeout", "--executor"):
        assert flag in help_text
    assert "poison" not in help_text


def test_empty_folder(fake: Server) -> None:
    """Serving needs nothing of the folder that it is started in: these servers run in empty ones."""
    assert fake.get("/v1/models").json()["data"][0]["id"] == "demo"


def test_torch_only_in_the_engine(demo: Server) -> None:
    """The web process of a real model has never loaded torch; its engine has."""
    assert demo.complete("torch").status_code == 200
    assert not has_torch(demo.pid)
    assert has_torch(demo.engine_pid())


def bad_checkpoint(folder: Path, what: str) -> Path:
    """The demo checkpoint with one thing wrong."""
    shutil.copytree(DEMO, folder / "model")
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
def test_checkpoint_that_cannot_be_served(tmp_path: Path, what: str, message: str) -> None:
    """The command ends with an error that names the trouble; it does not try again."""
    model = bad_checkpoint(tmp_path, what)
    ended = run_quipu("serve", str(model), "--port", "0", folder=tmp_path)
    assert ended.returncode in (1, 2)
    complaints = [line for line in ended.stderr.splitlines() if line.startswith("quipu: ")]
    assert message in complaints[0] and "Traceback" not in ended.stderr
    assert ended.stderr.count("engine.died") <= 1


def test_port_in_use(fake: Server, tmp_path: Path) -> None:
    """A taken port is an error that says which port, and no server is left behind."""
    port = fake.address[1]
    ended = run_quipu("serve", "--executor", "fake", "--port", str(port), folder=tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr and "in use" in ended.stderr


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    """A context that the KV cache cannot hold is refused at once, by the flags' names."""
    ended = run_quipu("serve", "--max-model-len", "4096", "--num-blocks", "10", folder=tmp_path)
    assert ended.returncode == 2 and "--max-model-len 4096" in ended.stderr and "Traceback" not in ended.stderr


def test_open_server_is_not_for_web_pages(fake: Server) -> None:
    """As it is started by default it answers to the names of loopback, and to no page of another site."""
    cases: tuple[tuple[dict[str, str], int], ...] = (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Origin": "https://site.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    )
    for headers, status in cases:
        assert httpx.get(f"{fake.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == status, headers
