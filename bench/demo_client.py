"""A server of the demo model, started or already there, and requests to it. Used by `bench.demo_model` and by tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.http_load import free_port

PATIENCE_S = 600.0
STREAMS = 16

Body = dict[str, Any]


class Answer(NamedTuple):
    """An answer's text and logprobs, why it ended, and its usage."""

    text: str
    logprobs: Any
    finish_reason: str
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        """Return how many of the prompt's tokens were reused."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Client:
    """Sends requests to an OpenAI-compatible server, at most `STREAMS` at a time."""

    def __init__(self, base_url: str, model: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model or self._get("/v1/models")["data"][0]["id"]
        self.finish_reasons: list[str] = []
        """Why each answer of at least one token ended."""
        self._lock = threading.Lock()

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        """Ask for a chat completion: greedy, of up to 400 tokens, unless `fields` say otherwise."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 400} | fields
        response = self._post("/v1/chat/completions", body)
        choice = response["choices"][0]
        text = choice["message"]["content"] or ""
        return self._noted(Answer(text, choice.get("logprobs"), choice["finish_reason"], response["usage"]))

    def complete(self, prompt: str, **fields: Any) -> Answer:
        """Ask for the continuation of a text that the caller has rendered."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 400} | fields
        response = self._post("/v1/completions", body)
        choice = response["choices"][0]
        answer = Answer(choice["text"], choice.get("logprobs"), choice["finish_reason"], response["usage"])
        return answer if body["max_tokens"] == 0 else self._noted(answer)

    def chats(self, bodies: Iterable[Body]) -> list[Answer]:
        """Ask for many chat completions and return the answers in the same order."""
        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(lambda body: self.chat(**body), bodies))

    def completions(self, bodies: Iterable[Body]) -> list[Answer]:
        """Ask for many completions and return them in the same order."""
        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def _noted(self, answer: Answer) -> Answer:
        with self._lock:
            self.finish_reasons.append(answer.finish_reason)
        return answer

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.base_url + path, timeout=PATIENCE_S) as response:
            return json.load(response)

    def _post(self, path: str, body: Body) -> Any:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None


@contextmanager
def served(model: str = "demo", *flags: str) -> Iterator[str]:
    """Run `quipu serve` until the block is left; yields its base URL."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("quipu")), "serve", model, "--port", str(port)]
        process = subprocess.Popen([*command, "--data-dir", folder, "--log-level", "warning", *flags])
        try:
            _wait(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], base_url: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start; see its output above")
