"""Sampling fields of OpenAI's endpoints: what each becomes, and how invalid values are refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.tokenizer import Encode
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/responses": {"input": "p"},
}
LIMITS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


async def encode_of(path: str, **fields: Any) -> Encode:
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, {"model": "tiny", **PROMPTS[path], **fields})
    assert exchange.status == 200, answer
    return desk.ticket.encode


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"presence_penalty": -2}, LogitRules(presence_penalty=-2.0)),
        ({"frequency_penalty": 1.5}, LogitRules(frequency_penalty=1.5)),
        ({"repetition_penalty": 0.01}, LogitRules(repetition_penalty=0.01)),
        ({"logit_bias": {"5": -100, "99": 0.5}}, LogitRules(bias={5: -100.0, 99: 0.5})),
        ({"allowed_token_ids": [3, 3, 0]}, LogitRules(allowed_token_ids=(3, 3, 0))),
        ({"min_tokens": 4}, LogitRules(min_tokens=4)),
        (
            {"presence_penalty": 1, "repetition_penalty": 2, "min_tokens": 1},
            LogitRules(presence_penalty=1.0, repetition_penalty=2.0, min_tokens=1),
        ),
    ],
)
async def test_rules(path: str, fields: dict[str, Any], rules: LogitRules) -> None:
    """Each field reaches the tokenizer as a rule."""
    assert (await encode_of(path, **fields)).sampling.rules == rules


NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [],
    "min_tokens": 0, "allowed_token_ids": None, "min_p": 0, "stop_token_ids": [],
}  # fmt: skip


@pytest.mark.parametrize("path", PROMPTS)
async def test_neutral_values_make_no_rules(path: str) -> None:
    """A request with neutral values has no rules and no extra cost; null means absent."""
    for fields in ({}, NEUTRAL, dict.fromkeys(NEUTRAL)):
        encode = await encode_of(path, **fields)
        assert encode.sampling.rules is None and encode.bad_words == ()


@pytest.mark.parametrize("path", PROMPTS)
async def test_bad_words(path: str) -> None:
    """Bad words reach the tokenizer as words, without duplicates."""
    encode = await encode_of(path, bad_words=[" one", "two", " one"])
    assert encode.bad_words == (" one", "two") and encode.sampling.rules is None


@pytest.mark.parametrize("value", [-1, 0, None])
@pytest.mark.parametrize("path", PROMPTS)
async def test_top_k_is_off(path: str, value: int | None) -> None:
    """Every documented value for "off" turns `top_k` off."""
    assert (await encode_of(path, top_k=value)).sampling.top_k == 0


async def test_completions_take_the_chat_limit() -> None:
    """`max_completion_tokens` is accepted where completions have only `max_tokens`."""
    encode = await encode_of("/v1/completions", max_completion_tokens=7, max_tokens=9)
    assert (encode.max_tokens, encode.max_tokens_param) == (7, "max_completion_tokens")


BAD: list[tuple[dict[str, Any], str, str]] = [
    *[({name: value}, name, "a number") for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
      for value in cast(tuple[Any, ...], (True, "1", [], {}))],
    ({"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than 0."),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "must be greater than 0."),
    ({"min_p": True}, "min_p", "a number"),
    ({"min_p": -0.1}, "min_p", "between 0 and 1"),
    ({"logit_bias": []}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"5": True}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"5": None}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"100": 1}}, "logit_bias", "below 100"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": -101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty list"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "a list of integer token ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids", "a list of integer token ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids", "a list of integer token ids"),
    ({"allowed_token_ids": [100]}, "allowed_token_ids", "below 100"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "at least 0"),
    ({"allowed_token_ids": [1] * 101}, "allowed_token_ids", "at most 100"),
    ({"bad_words": "word"}, "bad_words", "a list of strings"),
    ({"bad_words": [1]}, "bad_words", "a list of strings"),
    ({"bad_words": [None]}, "bad_words", "a list of strings"),
    ({"bad_words": [""]}, "bad_words", "not all white space"),
    ({"bad_words": ["a", " \n"]}, "bad_words", "not all white space"),
    ({"bad_words": ["a" * 257]}, "bad_words", "between 1 and 256"),
    ({"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 1.5}, "min_tokens", "an integer"),
    ({"min_tokens": True}, "min_tokens", "an integer"),
    ({"min_tokens": "1"}, "min_tokens", "an integer"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "a list of integer token ids"),
    ({"length_penalty": True}, "length_penalty", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(("fields", "param", "message"), BAD)
async def test_bad_fields(path: str, fields: dict[str, Any], param: str, message: str) -> None:
    """An invalid field is a 400 that names it in `param` and message; no ticket is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, {"model": "tiny", **PROMPTS[path], **fields})
    error = answer["error"]
    assert exchange.status == 400, answer
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert message in error["message"] and f"`{param}`" in error["message"]
    assert not desk.tickets


@pytest.mark.parametrize("path", PROMPTS)
async def test_minimum_beyond_the_limit(path: str) -> None:
    """A contradictory request is refused, and the error names the limit's field as the client wrote it."""
    fields = {LIMITS[path]: 3, "min_tokens": 4}
    exchange, answer = await Client(make_app(FakeDesk())).post(path, {"model": "tiny", **PROMPTS[path], **fields})
    assert exchange.status == 400 and answer["error"]["param"] == "min_tokens"
    assert f"at most `{LIMITS[path]}`, which is 3" in answer["error"]["message"]


async def test_minimum_beyond_a_default() -> None:
    """The default of 16 tokens for a completion without a limit counts as well."""
    path = "/v1/completions"
    exchange, answer = await Client(make_app(FakeDesk())).post(path, {"model": "tiny", "prompt": "p", "min_tokens": 17})
    assert exchange.status == 400 and answer["error"]["param"] == "min_tokens"
