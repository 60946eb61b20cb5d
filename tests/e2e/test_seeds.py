"""A request without a seed can be reproduced: its record contains the seed that the server chose."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.prompts import text_prompt
from tests.e2e.servers import Server

SAMPLED = {"model": "demo", "temperature": 1, "top_p": 0.98}
CHAT = [{"role": "user", "content": text_prompt("seeds", 12)}]
PENALISED = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "bad_words": ["the"], "logit_bias": {"500": 1.5}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": text_prompt("seeds", 20), "max_tokens": 24, **PENALISED}),
    "choices": ("/v1/completions", {"prompt": ["a", "a"], "n": 3, "max_tokens": 16, "ignore_eos": True}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 24, "n": 2, **PENALISED}),
    "responses": ("/v1/responses", {"input": text_prompt("seeds", 12), "max_output_tokens": 24, **PENALISED}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 24}),
}


def texts_of(answer: dict[str, Any]) -> list[str]:
    """Return the text of each choice, in any API's format."""
    if "choices" in answer:
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    (item,) = answer.get("output", [answer])
    return ["".join(part["text"] for part in item["content"])]


def ask(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    response = server.post(path, {**SAMPLED, **body})
    assert response.status_code == 200, response.text
    return response


def record_of(server: Server, response: httpx.Response) -> dict[str, Any]:
    found = server.get(f"/v1/usage/{response.headers['X-Quipu-Request-Id']}")
    assert found.status_code == 200, found.text
    return dict(found.json())


@pytest.mark.parametrize("name", REQUESTS)
def test_recorded_seed_reproduces_text(tiny: Server, name: str) -> None:
    """The recorded seed reproduces every choice on every API; another request without a seed differs."""
    path, body = REQUESTS[name]
    first, other = ask(tiny, path, body), ask(tiny, path, body)
    seed = record_of(tiny, first)["seed"]
    assert isinstance(seed, int) and 0 <= seed < 2**53
    assert seed != record_of(tiny, other)["seed"]
    texts = texts_of(first.json())
    assert len(set(texts)) == len(texts) and texts_of(other.json()) != texts
    again = ask(tiny, path, {**body, "seed": seed})
    assert texts_of(again.json()) == texts
    assert record_of(tiny, again)["seed"] == seed


@pytest.mark.parametrize(("seed", "recorded"), [(7, 7), (-7, -7), (2**63 - 1, 2**63 - 1), (2**64 - 1, -1)])
def test_given_seed_is_recorded(tiny: Server, seed: int, recorded: int) -> None:
    """A given seed is recorded as a signed 64-bit integer, which gives the same output."""
    path, body = REQUESTS["completions"]
    first = ask(tiny, path, {**body, "seed": seed})
    assert record_of(tiny, first)["seed"] == recorded
    assert texts_of(ask(tiny, path, {**body, "seed": recorded}).json()) == texts_of(first.json())
