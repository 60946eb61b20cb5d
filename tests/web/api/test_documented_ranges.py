"""Every value that the documents of an API allow is accepted, on every endpoint that has the field."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.asked import ask
from tests.web.fakes import INFO, FakeDesk

QUESTION = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
}
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LIMITS = {path: next(name for name in body if name.startswith("max_")) for path, body in BODIES.items()}
EVERYWHERE: list[dict[str, Any]] = [
    {"top_p": 0}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 1}, {"temperature": 0}, {"temperature": 1.0},
    {"top_k": 0}, {"top_k": 5.0}, {"seed": 7.0},
]  # fmt: skip
EXTENSIONS: list[dict[str, Any]] = [
    {"temperature": 2}, {"top_k": -1}, {"min_p": 0}, {"min_p": 1}, {"presence_penalty": -2}, {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0}, {"frequency_penalty": 2}, {"repetition_penalty": 0.01}, {"repetition_penalty": 2},
    {"seed": -1}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"logit_bias": {"5": -100, "6": 100}}, {"min_tokens": 2.0},
    {"stop": None}, {"stop": []}, {"stop": "a"}, {"stop": ["a", "b", "c", "d"]}, {"n": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_ends_of_ranges(path: str) -> None:
    """Both ends of every documented range are accepted, and whole numbers that are written as floats."""
    for fields in EVERYWHERE + (EXTENSIONS if path in OPENAI else []):
        await ask(path, {"model": "tiny", **BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
async def test_whole_numbers(path: str) -> None:
    """5.0 is the integer 5."""
    encode = (await ask(path, {"model": "tiny", **BODIES[path], LIMITS[path]: 5.0, "seed": 7.0})).encode
    assert (encode.max_tokens, encode.sampling.seed) == (5, 7)
    assert all(type(number) is int for number in (encode.max_tokens, encode.sampling.seed))


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize("path", BODIES)
async def test_model_may_be_absent(path: str, model: dict[str, Any]) -> None:
    """If only one model is served, a request need not name it; the response does."""
    assert (await ask(path, {**model, **BODIES[path]})).answer["model"] == INFO.model_names[0]


@pytest.mark.parametrize("path", BODIES)
async def test_model_is_required_of_several(path: str) -> None:
    """If a model of an upstream is served as well, a request must name its model."""
    desk = FakeDesk(info=attrs.evolve(INFO, passed_on={"other": None}))
    exchange, answer = await Client(make_app(desk)).post(path, BODIES[path])
    assert exchange.status == 400 and "`model`" in answer["error"]["message"] and not desk.tickets
