"""Whole servers for tests: `quipu serve` in its own processes, on a free port, in an empty folder.

`serving` starts one, reads its address from its log, and stops it with SIGTERM. A `Server` sends requests over real
sockets and inspects the server's processes through /proc.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

import anthropic
import attrs
import httpx
import openai

from quipu.web.auth.key_file import hash_key
from tests.e2e.launcher import LAUNCHER, Launched, launch
from tests.processes import PATIENCE_S, eventually, has_ended
from tests.tiny import BLOCK, EXECUTOR, TINY, full_blocks

__all__ = ["BLOCK", "full_blocks"]

NAMED = os.environ.get("QUIPU_COMMAND")
QUIPU = Path(NAMED or Path(sys.executable).with_name("quipu"))
"""The command under test; `test_wheel.py` sets that of an installed wheel."""
Process = subprocess.Popen[bytes] | Launched
SIZES = {"--num-blocks", "--kv-cache-memory", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--executor"}
"""Flags on which the size of the cache depends; the fake executor's takes no memory."""
NUM_BLOCKS = 1200
COSTS = ("--speculative-costs", "1:10,16:12,64:20")
"""About what an engine measures of `TINY` when it starts, longer the busier the machine is."""
UNMEASURED = {"demo", "fake", "--speculative", COSTS[0]}
"""Words with which a server is left to do so, or has nothing to measure."""
READY_S = 200.0 if EXECUTOR == "vllm" else PATIENCE_S
"""How long a server may take to be ready; vLLM is imported in ten seconds on an idle machine."""


def serve_command(*flags: str) -> list[str]:
    """Return the arguments of `quipu serve` with `flags`; the model is `TINY` unless they begin with one.

    The cache of `TINY` is small unless a flag sets its size, and engines are told what drafts cost, which saves half a
    second each and depends on no clock. The demo model's engine measures it.
    """
    if EXECUTOR != "vllm" and not UNMEASURED & set(flags):
        flags = (*flags, *COSTS)
    if flags and not flags[0].startswith("-"):
        return ["serve", *flags]
    blocks = () if SIZES & set(flags) else ("--num-blocks", str(NUM_BLOCKS))
    if EXECUTOR == "vllm" and "--executor" not in flags:
        flags = ("--executor", "vllm", "--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager", *flags)
    return ["serve", str(TINY), "--served-model-name", "demo", *blocks, *flags]


def start_quipu(folder: Path, *arguments: str) -> tuple[Process, Path]:
    """Start `quipu ARGUMENTS` in `folder`, created if missing; stderr goes to the returned file, next to it."""
    folder.mkdir(exist_ok=True)
    log_path = folder.with_name(folder.name + ".log")
    with log_path.open("wb") as log, Path(os.devnull).open("wb") as nowhere:
        return start_with_streams(folder, arguments, nowhere, log), log_path


def start_with_streams(folder: Path, arguments: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> Process:
    """Start `quipu ARGUMENTS` in `folder`."""
    if NAMED is None:
        return launch(arguments, folder, stdout.fileno(), stderr.fileno())
    command = [NAMED, *arguments]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)


def run_quipu(*arguments: str, folder: Path = Path(), timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `quipu ARGUMENTS` in `folder` until it exits."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = start_with_streams(folder, arguments, stdout, stderr)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        assert process.returncode is not None
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (stdout, stderr)]
        return subprocess.CompletedProcess(arguments, process.returncode, *texts)


@attrs.define(eq=False)
class Server:
    """A server that is running or has ended."""

    process: Process
    log_path: Path
    url: str = ""

    # ------------------------------------------------------------ its log

    @property
    def log_text(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the parsed log lines of one event, without a line that is still being written."""
        whole = self.log_text.rpartition("\n")[0].splitlines()
        records = [json.loads(line) for line in whole if line.startswith("{")]
        return [record for record in records if record["event"] == name]

    # ------------------------------------------------------------ over HTTP

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """Return OpenAI's client, without retries, which would hide failures. The caller closes it."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, admin_api_key=api_key, max_retries=0, timeout=PATIENCE_S
        )

    def anthropic_client(self, api_key: str = "none") -> anthropic.Anthropic:
        """Return Anthropic's client, without retries and with strict type validation. The caller closes it."""
        return anthropic.Anthropic(
            base_url=self.url, api_key=api_key, max_retries=0, timeout=PATIENCE_S, _strict_response_validation=True
        )

    def get(self, path: str) -> httpx.Response:
        """Send a GET on a new connection and close it."""
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **kwargs)

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> httpx.Response:
        """Send a greedy completion that ignores EOS; return the HTTP response."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", body | fields)

    def metrics(self) -> dict[str, float]:
        """Return samples by name and labels, summed over engines: `open_accounts`, `kv_blocks{state="used"}`."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("quipu:"):
                name, value = line.removeprefix("quipu:").rsplit(" ", 1)
                name = re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def wait_at_rest(self) -> dict[str, float]:
        """Wait until no account is open and no block is held; return the metrics."""

        def rest() -> dict[str, float] | None:
            metrics = self.metrics()
            return None if metrics["open_accounts"] or metrics['kv_blocks{state="used"}'] else metrics

        return eventually(rest, "the server comes to rest")

    def wait_listening(self, within_s: float = PATIENCE_S) -> None:
        """Wait until the log has the server's URL."""

        def listening() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self.log_text
            return self.events("server.listening")

        self.url = eventually(listening, "the server listens", within_s)[0]["url"][0]

    def wait_ready(self, within_s: float = PATIENCE_S) -> None:
        eventually(self.is_ready, "/ready answers 200", within_s)

    def is_ready(self) -> bool:
        """Request /ready without httpx, which would take longer than the server."""
        connection = HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    # ------------------------------------------------------------ its processes

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine_pid(self) -> int:
        """Wait for the web process's engine and return its pid."""
        (pid,) = eventually(self.engines, "the web process has an engine")
        return pid

    def engines(self) -> list[int]:
        """Return the pids of the web process's running engines."""
        return [pid for pid in self.children() if runs(pid, "quipu.actors.fleet.processes.engine_process")]

    def chat_workers(self) -> list[int]:
        """Return the pids of the web process's running chat workers."""
        return [pid for pid in self.children() if runs(pid, "quipu.actors.text_workers.chat_worker")]

    def children(self) -> list[int]:
        """Return the pids of the web process's running children, without spare engines of the launcher."""
        try:
            tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
            pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [pid for pid in pids if not has_ended(pid) and not runs(pid, LAUNCHER)]

    @contextmanager
    def paused_engine(self) -> Iterator[None]:
        """Suspend the engine until the block is left, so that no running request ends meanwhile.

        The block must take less than 8 s: then an engine counts as lost.
        """
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> int:
        """Send SIGTERM, as an operator would, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(
    folder: Path, *flags: str, exit_code: int = 0, has_engine: bool = True, ready_s: float = READY_S
) -> Iterator[Server]:
    """Run `serve_command(*flags)` until the block is left; it must then exit with `exit_code` and leave no process."""
    process, log_path = start_quipu(folder, *serve_command(*flags), "--port", "0")
    server = Server(process, log_path)
    try:
        server.wait_listening()
        server.wait_ready(ready_s)
        engine_pids = eventually(server.engines, "the web process has an engine") if has_engine else []
        yield server
        if process.poll() is None:
            if has_engine:
                # engines may have been restarted
                engine_pids = eventually(server.engines, "the web process still has an engine")
            assert server.stop() == exit_code, server.log_text
        eventually(lambda: all(map(has_ended, engine_pids)), "the engine processes end")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def write_keys(path: Path, **keys: str) -> None:
    """Write a key file with a key for each tenant; `ops` is an admin."""
    entries = [
        {"id": f"id-{name}", "name": name, "tenant": name, "sha256": hash_key(key), "admin": name == "ops"}
        for name, key in keys.items()
    ]
    path.write_text(json.dumps({"keys": entries}))


def runs(pid: int, module: str) -> bool:
    """Return whether a process was started to run `module`."""
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def num_files(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def settled_num_files(pid: int) -> int:
    """Return `num_files` once it is stable: connections closed by their clients disappear with a delay."""
    counts: list[int] = []

    def look() -> bool:
        counts.append(num_files(pid))
        return len(counts) >= 20 and len(set(counts[-20:])) == 1

    eventually(look, "the number of open files settles")
    return counts[-1]


def has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch's library."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def usage_of(answer: Any) -> dict[str, Any]:
    """Return the usage object of a response or chunk of the openai client, without fields that were not sent."""
    assert answer.usage is not None
    usage: dict[str, Any] = answer.usage.model_dump(exclude_none=True)
    return usage


def cached_of(answer: Any) -> int:
    cached: int = usage_of(answer)["prompt_tokens_details"]["cached_tokens"]
    return cached
