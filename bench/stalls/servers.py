"""The servers that rows are sent to: the demo model on the fake executor, with various tokenizers and templates.

The fake executor always returns the same token without reading any input (`--fake-token-id`), or, for a `reply`, the
tokens of a text, at ten milliseconds per step: the benchmark measures the web process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer

from bench.stalls.adapter_rows import FLAGS as ADAPTING
from bench.stalls.adapter_rows import make_adapters
from bench.stalls.booked_ledger import write_ledger
from bench.stalls.monitor import health_of
from quipu.actors.shared.checkpoint import DEMO

PATIENCE_S = 60.0
_LETTER_A = "67"
"""The token of every stream, in the demo's vocabulary."""
_DRAFTS = ("--speculative", "ngram", "--speculative-costs", "1:1,2:2")
"""Drafts are looked for, and never worth verifying, so that a step yields one token of each stream."""
_COMMON = ("--executor", "fake", "--fake-step-seconds", "0.01", *_DRAFTS)
_REPLY_TOKENS = 2_000
_LONG = 1 << 20


@attrs.frozen
class Kind:
    """Changes to the demo's checkpoint, and flags, of a server."""

    change: Callable[[Path], None] = lambda folder: None
    flags: Sequence[str] = ()
    max_files: int | None = None
    reply: tuple[str, str] | None = None
    """What the model writes to every client: a text, and another one for ever."""
    has_upstream: bool = False
    """Requests for another model are passed on (`upstream.py`)."""
    is_followed: bool = False
    """What the upstream has cached is followed through its KV events (`published_blocks.py`)."""
    is_booked: bool = False
    """The ledger has 100,000 records (`booked_ledger.py`)."""


@attrs.define(eq=False)
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def is_alive(self) -> bool:
        """Return whether the same process still responds."""
        return self.process.poll() is None and health_of(self.port) is not None

    def reset_peak(self) -> None:
        for pid in self._pids():
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:
                continue

    def peak_mib(self) -> float:
        """Return the sum of the peak memory of its processes since `reset_peak`."""
        total = 0
        for pid in self._pids():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return total / 1024

    def _pids(self) -> list[int]:
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    waiting += map(int, task.read_text().split())
                except OSError:
                    continue
        return found


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[Server]:
    """Run a server of this kind until the block is left."""
    with ExitStack() as stack:
        flags = list(KINDS[kind].flags)
        if KINDS[kind].has_upstream:
            port, events_port = stack.enter_context(_upstream())
            options = f",kv-events=tcp://127.0.0.1:{events_port},tokenizer={DEMO}" if KINDS[kind].is_followed else ""
            flags += ["--engines", "1", "--upstream", f"http://127.0.0.1:{port}{options}"]
        yield stack.enter_context(_serving(kind, folder, flags))


@contextmanager
def _upstream() -> Iterator[list[int]]:
    """Run an upstream until the block is left; its port and that of its KV events are yielded."""
    command = [sys.executable, "-m", "bench.stalls.upstream"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


@contextmanager
def _serving(kind: str, folder: Path, flags: Sequence[str]) -> Iterator[Server]:
    folder.mkdir()
    checkpoint = folder / "demo"
    shutil.copytree(DEMO, checkpoint)
    how = KINDS[kind]
    how.change(checkpoint)
    if how.is_booked:
        write_ledger(folder / "data")

    def limit_files() -> None:
        if how.max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (how.max_files, how.max_files))

    drawn = ("--fake-token-id", _LETTER_A)
    if how.reply is not None:
        drawn = ("--fake-replies", _write_replies(checkpoint, *how.reply))
    command = [
        Path(sys.executable).with_name("quipu"),
        "serve",
        str(checkpoint),
        "--port",
        "0",
        *_COMMON,
        *drawn,
        *flags,
    ]
    log_path = folder / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command), "--log-level", "info"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            preexec_fn=limit_files,
        )
    try:
        yield Server(process, _port_of(process, log_path))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _write_replies(checkpoint: Path, first: str, repeated: str) -> str:
    """Write the file for `--fake-replies`, and return its path."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    begun, unit = (tokenizer.encode(text, add_special_tokens=False).ids for text in (first, repeated))
    path = checkpoint / "replies.json"
    path.write_text(json.dumps({-1: begun + unit * (_REPLY_TOKENS // len(unit))}), "utf-8")
    return str(path)


def _port_of(process: subprocess.Popen[bytes], log_path: Path) -> int:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for line in log_path.read_text("utf-8", "replace").splitlines():
            if '"server.listening"' in line and line.endswith("}"):
                port = int(json.loads(line)["url"][0].rsplit(":", 1)[1])
                if (health_of(port) or {}).get("state", "ready") == "ready":
                    return port
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log_path.read_text('utf-8', 'replace')[-2000:]}")


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def _long(folder: Path) -> None:
    _edit(folder / "config.json", lambda config: config.update(max_position_embeddings=_LONG))


def _gpt2(folder: Path) -> None:
    """Split text as GPT-2 does, where the demo splits as Qwen does."""
    _long(folder)
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _edit(folder / "tokenizer.json", lambda parts: parts.update(normalizer=None, pre_tokenizer=pre_tokenizer))


def _template(source: str) -> Callable[[Path], None]:
    # behaves normally when tried at start-up: only a client's message triggers it
    return lambda folder: _write(folder / "chat_template.jinja", source)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")


def _seeing(folder: Path) -> None:
    """Have the server read images, which the fake executor does not look at."""
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    seeing = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": vision, "image_token_id": 0}
    _edit(folder / "config.json", lambda config: config.update(seeing, max_position_embeddings=_LONG))
    _write(folder / "preprocessor_config.json", json.dumps({"size": {"shortest_edge": 16}, "crop_size": 16}))
    name = Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(0)
    parts = f"{{% for part in m.content %}}{{{{ '{name}' if part.type == 'image' else part.text }}}}{{% endfor %}}"
    _write(folder / "chat_template.jinja", f"{{% for m in messages %}}{parts}{{% endfor %}}")


_FLAGS_LONG = ("--num-blocks", "80000")
KINDS: dict[str, Kind] = {
    "demo": Kind(),
    "small": Kind(
        flags=("--max-model-len", "1024"),
        reply=("<think>a</think>", '<tool_call>{"name": "look_up", "arguments": {"a": [1]}}</tool_call>'),
    ),
    "long": Kind(_gpt2, _FLAGS_LONG),
    "qwen": Kind(_long, _FLAGS_LONG),
    "looping": Kind(_template(("{% for a in range(99999) %}" * 3) + ("{% endfor %}" * 3))),
    "seeing": Kind(_seeing, _FLAGS_LONG),
    "writing": Kind(_template("{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}")),
    "recursing": Kind(_template("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}")),
    "passing": Kind(_long, _FLAGS_LONG, has_upstream=True),
    "following": Kind(_long, _FLAGS_LONG, has_upstream=True, is_followed=True),
    "few_files": Kind(max_files=256),
    "booked": Kind(is_booked=True),
    "stored": Kind(_gpt2, (*_FLAGS_LONG, "--response-store", "1h", "--response-store-bytes", "64MiB")),
    "adapting": Kind(make_adapters, ADAPTING),
    "embedding": Kind(_long, (*_FLAGS_LONG, "--task", "embed", "--speculative", "off", "--fake-vector-size", "4096")),
    "opening": Kind(_long, _FLAGS_LONG, reply=("", "<tool_call>")),
    "calling": Kind(_long, _FLAGS_LONG, reply=("", '<tool_call>{"name": "tool0", "arguments": {}}</tool_call>')),
    "nesting": Kind(_long, _FLAGS_LONG, reply=('<tool_call>\n{"name": "tool0", "arguments": {"p0": ', '[{"p0": ')),
    "nesting_values": Kind(
        _long,
        (*_FLAGS_LONG, "--tool-call-parser", "qwen3_coder"),
        reply=("<tool_call>\n<function=tool0>\n<parameter=p0>\n", "[[[["),
    ),
    "thinking": Kind(_long, _FLAGS_LONG, reply=("<think>\n", "So be it. ")),
    "rethinking": Kind(_long, _FLAGS_LONG, reply=("", "<think>a</think>b")),
    "angles": Kind(_long, _FLAGS_LONG, reply=("", "<")),
    "blanks": Kind(_long, _FLAGS_LONG, reply=("a", " " * 12)),
}
