"""Invalid requests: each has its status and names its field, in the shape of the OpenAI API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# fields, param, a part of the message
EITHER: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 3}, "model", "a string"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number"),
    ({"temperature": -0.1}, "temperature", "between 0 and 2"),
    ({"temperature": 2.1}, "temperature", "between 0 and 2"),
    ({"top_p": -0.1}, "top_p", "between 0 and 1"),
    ({"top_p": 1.5}, "top_p", "between 0 and 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"min_p": 2}, "min_p", "between 0 and 1"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": -(2**63) - 1}, "seed", "64 bits"),
    ({"seed": "7"}, "seed", "an integer"),
    ({"max_tokens": -1}, "max_tokens", "at least"),
    ({"max_tokens": 1.5}, "max_tokens", "an integer"),
    ({"max_tokens": True}, "max_tokens", "an integer"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "between 1 and 128"),
    ({"n": "2"}, "n", "an integer"),
    ({"stop": ""}, "stop", "between 1 and"),
    ({"stop": ["a", ""]}, "stop", "between 1 and"),
    ({"stop": "x" * 5000}, "stop", "between 1 and"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop", "a list of strings"),
    ({"stop": {"a": 1}}, "stop", "a list of strings"),
    ({"stop_token_ids": 3}, "stop_token_ids", "a list"),
    ({"stop_token_ids": [3, "x"]}, "stop_token_ids", "integer token ids"),
    ({"stop_token_ids": [100]}, "stop_token_ids", "below 100"),
    ({"stop_token_ids": [1] * 300}, "stop_token_ids", "at most 256"),
    ({"ignore_eos": 1}, "ignore_eos", "a boolean"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", "a boolean"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "a boolean"),
    ({"stream": "yes"}, "stream", "a boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "`stream` is true"),
    ({"stream": True, "stream_options": []}, "stream_options", "an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "a boolean"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": "x"}},
        "stream_options.include_obfuscation",
        "a boolean",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": "x"}},
        "stream_options.continuous_usage_stats",
        "a boolean",
    ),
    ({"return_cached_tokens_details": "yes"}, "return_cached_tokens_details", "a boolean"),
    ({"logprobs": "all"}, "logprobs", "expected"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "an integer"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "when `stream` is true"),
    ({"regex": "a+"}, "regex", "not supported"),
    ({"ebnf": "root ::= 'a'"}, "ebnf", "not supported"),
    ({"json_schema": "{}"}, "json_schema", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"best_of": 2}, "best_of", "supported"),
    ({"repetition_detection": {"min_count": 3}}, "repetition_detection", "not supported"),
    ({"vllm_xargs": {"penalty": 1}}, "vllm_xargs", "not supported"),
    ({"cache_salt": 7}, "cache_salt", "a string"),
    ({"cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    ({"priority": "high"}, "priority", "an integer"),
    ({"priority": 2**40}, "priority", "between"),
]
ONLY_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": True}, "logprobs", "an integer"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": 1, "top_logprobs": 2}, "top_logprobs", "not supported"),
    ({"echo": 1}, "echo", "a boolean"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "at least 0"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": 5}, "prompt", "a list of strings"),
    ({"prompt": {"text": "x"}}, "prompt", "a list of strings"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": [[1], []]}, "prompt", "at least one token"),
    ({"prompt": ["a", 1]}, "prompt", "a list of strings"),
    ({"prompt": [[1], "a"]}, "prompt", "a list of strings"),
    ({"prompt": [True]}, "prompt", "a list of strings"),
    ({"prompt": [1, True]}, "prompt", "a list of strings"),
    ({"prompt": [1.0]}, "prompt", "a list of strings"),
    ({"prompt": [None]}, "prompt", "a list of strings"),
    ({"prompt": [[1, True]]}, "prompt", "integer token ids"),
    ({"prompt": [[1, [2]]]}, "prompt", "integer token ids"),
    ({"prompt": [-1]}, "prompt", "at least 0"),
    ({"prompt": [100]}, "prompt", "below 100"),
    ({"prompt": [[1], [2**63]]}, "prompt", "below 100"),
    ({"prompt": [1] * 65}, "prompt", "context length is 64"),
    ({"prompt": ["a"] * 600}, "prompt", "at most 512"),
    ({"prompt": ["a"] * 100, "n": 6}, "prompt", "at most 512"),
    ({"n": 2, "best_of": 3}, "best_of", "must equal `n`"),
    ({"best_of": 2}, "best_of", "must equal `n`"),
    ({"suffix": 3}, "suffix", "a string"),
    ({"suffix": "x", "prompt": [1]}, "suffix", "if `prompt` is text"),
    ({"suffix": "x", "prompt": [[1], [2]]}, "suffix", "if `prompt` is text"),
    ({"suffix": "x", "echo": True}, "echo", "together with `suffix`"),
    ({"suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "together with `suffix`"),
    ({"thinking_token_budget": 0}, "thinking_token_budget", "not supported"),
    ({"return_token_ids": 1}, "return_token_ids", "a boolean"),
]
ONLY_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 5}, "logprobs", "a boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "an integer"),
    ({"top_logprobs": 2}, "top_logprobs", "when `logprobs` is true"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "when `logprobs` is true"),
    ({"echo": True}, "echo", "not supported"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": ["hi"]}, "messages[0]", "an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "a string"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content", "required"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must not be empty"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "required"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "`image_url`",
    ),
    (
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "belong in messages of users",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name", "a string"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 4, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"prediction": "x"}, "prediction", "an object"),
    ({"prediction": {"content": "x"}}, "prediction.type", "required"),
    ({"prediction": {"type": "audio", "content": "x"}}, "prediction.type", "`content`"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": {"type": "content", "content": 1}}, "prediction.content", "a string or a list of text parts"),
    ({"prediction": {"type": "content", "content": []}}, "prediction.content", ""),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text", "required"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content[0].type",
        "`text`",
    ),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"chat_template": "x"}, "chat_template", "not supported"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set"),
    ({"add_generation_prompt": "x"}, "add_generation_prompt", "a boolean"),
]
CASES = (
    [(COMPLETIONS, *case) for case in EITHER + ONLY_COMPLETIONS]
    + [(CHAT, *case) for case in EITHER + ONLY_CHAT]
)  # fmt: skip


def body(path: str, **fields: Any) -> dict[str, Any]:
    good = {"prompt": "p"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "p"}]}
    return {"model": "tiny", **good, **fields}


@pytest.mark.parametrize(("path", "fields", "param", "message"), CASES)
async def test_bad_fields(path: str, fields: dict[str, Any], param: str, message: str) -> None:
    """An invalid field is a 400 that names it in `param` and message; no ticket is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, body(path, **fields))
    error = answer["error"]
    assert exchange.status == 400, answer
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert message in error["message"] and param in error["message"]
    assert not desk.tickets


NEUTRAL_EITHER = {
    "logprobs": False, "top_logprobs": 0, "echo": False, "logit_bias": {}, "presence_penalty": 0.0,
    "frequency_penalty": 0, "repetition_penalty": 1.0, "guided_json": None, "use_beam_search": False,
    "response_format": {"type": "text"}, "prompt_logprobs": None, "min_tokens": 0, "length_penalty": 1,
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "stop": [], "stop_token_ids": [],
    "stream_options": {}, "top_p": 1, "min_p": 0, "top_k": 10**6, "seed": 2**64 - 1, "made_up": [1],
    "thinking_token_budget": -1, "vllm_xargs": {},
}  # fmt: skip
NEUTRAL_COMPLETIONS = {"suffix": "", "best_of": 1, "add_special_tokens": True}
NEUTRAL_CHAT = {
    "best_of": 1, "tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "audio": None,
    "modalities": ["text"], "prediction": None, "web_search_options": None, "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize(("path", "extra"), [(COMPLETIONS, NEUTRAL_COMPLETIONS), (CHAT, NEUTRAL_CHAT)])
async def test_neutral_values_are_accepted(path: str, extra: dict[str, Any]) -> None:
    """Neutral values of unsupported fields are accepted, as are unknown fields."""
    exchange, answer = await Client(make_app(FakeDesk())).post(path, body(path, **NEUTRAL_EITHER, **extra))
    assert exchange.status == 200, answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b"[]", "a JSON object"),
        (b'"x"', "a JSON object"),
        (b"null", "a JSON object"),
        (b"3", "a JSON object"),
    ],
)
async def test_bad_bodies(path: str, data: bytes, message: str) -> None:
    """A body that is not a JSON object is a 400, also if it is nested too deep or not UTF-8."""
    exchange, answer = await Client(make_app(FakeDesk())).post(path, data)
    assert exchange.status == 400
    assert message in answer["error"]["message"] and answer["error"]["param"] is None


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense", ""])
async def test_any_content_type(content_type: str) -> None:
    """The body is parsed as JSON whatever its content type."""
    client = Client(make_app(FakeDesk()))
    exchange, _ = await client.post(COMPLETIONS, body(COMPLETIONS), {"content-type": content_type})
    assert exchange.status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_model(path: str) -> None:
    """An unknown model is a 404 with the expected code, and precedes errors of other fields."""
    exchange, answer = await Client(make_app(FakeDesk())).post(path, {"model": "huge"})
    assert exchange.status == 404
    assert answer["error"]["code"] == "model_not_found" and answer["error"]["param"] == "model"


async def test_unknown_route_and_method() -> None:
    """404 and 405 have the same shape; 405 has Allow."""
    client = Client(make_app(FakeDesk()))
    for path in ("/v1/nothing", "/v1//models", "/v1/completions/", "//"):
        exchange, answer = await client.get(path)
        assert exchange.status == 404 and answer["error"]["type"] == "invalid_request_error", path
    exchange, answer = await client.get(COMPLETIONS)
    assert exchange.status == 405 and "POST" in exchange.headers["allow"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_body_too_large() -> None:
    """A body that is too large is a 413 in the same shape."""
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=100))
    exchange, answer = await Client(app).post(COMPLETIONS, json.dumps(body(COMPLETIONS, prompt="x" * 200)).encode())
    assert exchange.status == 413 and answer["error"]["code"] == "body_too_large"
