"""Every endpoint that reports usage to clients, for tests that compare them: what to send, and how to read it.

The same words give the same prompt on each of them. `Numbers` use the record's terms, whatever the API calls them.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from quipu.actors.messages.prompts import ChatPrompt
from tests.chats import encode_chat
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

VOCABULARY = Vocabulary(TINY)
MARK = {"cache_control": {"type": "ephemeral"}}


@attrs.frozen
class Numbers:
    """The numbers of one usage object; None if the API has no field for one."""

    prompt: int
    cached: int
    completion: int
    written: int | None = None
    created: int | None = None


@attrs.frozen
class ResponseUsage:
    """All usage in one response."""

    finals: list[Numbers]
    """At the end of the request."""
    starts: list[Numbers]
    """Before the first token."""
    running: list[Numbers]
    """In between."""
    is_error: bool
    has_ended: bool
    """Whether a stream ended as documented by its API."""


@attrs.frozen
class Surface:
    api: str
    path: str
    streamed: bool = False
    continuous: bool = False

    @property
    def name(self) -> str:
        return self.api + ("-continuous" if self.continuous else "-streamed" if self.streamed else "")

    def body(self, words: str, *, max_tokens: int = 8, stop: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return a greedy request; `fields` are passed unchanged."""
        request: dict[str, Any] = {"model": "demo", "temperature": 0, **fields}
        limit = "max_output_tokens" if self.api == "responses" else "max_tokens"
        request[limit] = max_tokens
        if stop is not None:
            request |= {"stop_sequences": [stop]} if self.api == "messages" else {"stop": [stop]}
        match self.api:
            case "completions":
                request["prompt"] = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
            case "chat":
                request["messages"] = [{"role": "user", "content": words}]
            case "responses":
                request["input"] = words
            case "messages":
                request["messages"] = [{"role": "user", "content": [{"type": "text", "text": words, **MARK}]}]
        if self.streamed:
            request["stream"] = True
            if self.api in ("completions", "chat"):
                request["stream_options"] = {"include_usage": True, "continuous_usage_stats": self.continuous}
        return request

    def read(self, data: bytes) -> ResponseUsage:
        """Read a response as far as it came."""
        if not self.streamed or data.startswith(b"{"):
            answer = json.loads(data) if data else {}
            usage = answer.get("usage")
            return ResponseUsage([self._numbers(usage)] if usage else [], [], [], bool(answer.get("error")), bool(data))
        return self._read_events(events_of(data), is_done=b"data: [DONE]" in data)

    def _read_events(self, events: list[dict[str, Any]], *, is_done: bool) -> ResponseUsage:
        finals, starts = [], []
        running: list[Any] = []
        kinds = [event.get("type") for event in events]
        for event in events:
            match self.api:
                case "messages":
                    if event["type"] == "message_start":
                        starts.append(self._numbers(event["message"]["usage"]))
                    elif "usage" in event:
                        assert event["type"] == "message_delta"
                        finals.append(self._numbers(event["usage"]))
                case "responses":
                    if usage := event.get("response", {}).get("usage"):
                        assert event is events[-1]
                        finals.append(self._numbers(usage))
                case _:
                    if usage := event.get("usage"):
                        (finals if event["choices"] == [] else running).append(self._numbers(usage))
        is_error = any("error" in (event.get("type"), *event) for event in events)
        has_ended = is_done if self.api in ("completions", "chat") else bool(kinds) and kinds[-1] in _LAST
        return ResponseUsage(finals, starts, running, is_error, has_ended)

    def _numbers(self, usage: dict[str, Any]) -> Numbers:
        if self.api == "messages":
            created = usage["cache_creation_input_tokens"]
            assert sum(usage["cache_creation"].values()) == created
            parts = (usage["input_tokens"], usage["cache_read_input_tokens"], created)
            assert min(parts) >= 0
            return Numbers(sum(parts), usage["cache_read_input_tokens"], usage["output_tokens"], created=created)
        words = ("input", "output") if self.api == "responses" else ("prompt", "completion")
        prompt, completion = (usage[f"{word}_tokens"] for word in words)
        assert usage["total_tokens"] == prompt + completion
        details = usage[f"{words[0]}_tokens_details"]
        return Numbers(prompt, details["cached_tokens"], completion, written=details["cache_write_tokens"])


_LAST = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
SURFACES = (
    Surface("completions", "/v1/completions"),
    Surface("completions", "/v1/completions", streamed=True),
    Surface("completions", "/v1/completions", streamed=True, continuous=True),
    Surface("chat", "/v1/chat/completions"),
    Surface("chat", "/v1/chat/completions", streamed=True),
    Surface("chat", "/v1/chat/completions", streamed=True, continuous=True),
    Surface("responses", "/v1/responses"),
    Surface("responses", "/v1/responses", streamed=True),
    Surface("messages", "/v1/messages"),
    Surface("messages", "/v1/messages", streamed=True),
)


def prompt_ids(words: str) -> list[int]:
    """Return the prompt that every surface makes of the same words."""
    return encode_chat(VOCABULARY, ChatPrompt(({"role": "user", "content": words},))).token_ids


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON of a stream's complete events."""
    whole = data.decode("utf-8", "replace").rpartition("\n\n")[0]
    lines = [line for block in whole.split("\n\n") for line in block.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
