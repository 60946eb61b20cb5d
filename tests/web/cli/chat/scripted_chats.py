"""Chats of `quipu chat` with a scripted server, without a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest

from quipu.web.cli.cli import main as quipu
from tests.web.cli.bench.bench_server import DONE, BenchServer, Reply, Request, chat_event, usage_event


@attrs.frozen
class Ended:
    """A chat that has ended."""

    code: int
    output: str
    errors: str

    @property
    def notes(self) -> list[str]:
        return self.errors.splitlines()


@attrs.frozen
class Chat:
    """Runs `quipu chat FLAGS` with lines on standard input."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, url: str, lines: Iterable[str], *flags: str) -> Ended:
        self.monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = quipu(["chat", "--base-url", url, *flags])
        output = self.capsys.readouterr()
        return Ended(code, output.out, output.err)


MODELS = Reply(200, "application/json", [json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()])


def answering(*replies: Reply) -> Callable[[Request], Reply]:
    """Return an answer to `GET /v1/models` and then these to the questions, in order."""
    remaining = iter(replies)
    return lambda request: MODELS if request.method == "GET" else next(remaining)


def said(*texts: str, prompt: int = 40, cached: int | None = 32, finish_reason: str = "stop") -> Reply:
    details = {} if cached is None else {"cached_tokens": cached}
    pieces = [chat_event({"content": text}) for text in texts]
    return Reply(pieces=[*pieces, chat_event({}, finish_reason), usage_event(prompt, len(texts), **details), DONE])


def failed(status: int, message: str) -> Reply:
    return Reply(status, "application/json", [json.dumps({"error": {"message": message}}).encode()])


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def bodies(server: BenchServer) -> list[Any]:
    return [request.body for request in server.requests if request.method == "POST"]


def contents(body: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]
