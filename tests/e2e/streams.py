"""Streamed completions read event by event, without a client library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import httpx

from tests.e2e.servers import PATIENCE_S, Server


@attrs.define(eq=False)
class Stream:
    """A stream that is being read."""

    response: httpx.Response
    text: str = ""
    error: dict[str, Any] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    _events: Iterator[None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._events = self._read()

    def _read(self) -> Iterator[None]:
        for line in self.response.iter_lines():
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
                yield

    def _take(self, event: dict[str, Any]) -> None:
        assert self.error is None, "an event follows an error"
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def read_some(self) -> None:
        """Wait for the next event."""
        next(self._events)

    def read_all(self) -> None:
        """Read to the end of the response, which must end properly."""
        for _ in self._events:
            pass


@contextmanager
def streaming(server: Server, prompt: Any, max_tokens: int, *, api_key: str | None = None) -> Iterator[Stream]:
    """Open a greedy stream and read its first event. Leaving the block drops the connection."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        stream = Stream(response)
        stream.read_some()
        yield stream
