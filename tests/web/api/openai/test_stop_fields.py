"""`stop_reason` of vLLM and `matched_stop` of SGLang: what ended a choice, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quipu.kernels.fake import Dials
from tests.runtimes import small_runtime
from tests.traps.wire import over_http
from tests.web.asgi_client import Client

LETTER, EOS = 67, 2
PROMPTS = {
    "/v1/completions": {"prompt": [7] * 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
}


async def ends(client: Client, path: str, **fields: Any) -> list[tuple[Any, Any, Any]]:
    """Return finish reason, `stop_reason` and `matched_stop`, whole and streamed; earlier chunks have none."""
    found = []
    for stream in (False, True):
        async with client.open(
            "POST", path, {**PROMPTS[path], "max_tokens": 6, "stream": stream, **fields}
        ) as exchange:
            assert await exchange.wait_started() == 200
            data = await exchange.read()
        if stream:
            lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            assert all("stop_reason" not in choice and "matched_stop" not in choice for choice in choices[:-1])
        else:
            choices = json.loads(data)["choices"]
        last = choices[-1]
        assert ("stop_reason" in last) == ("matched_stop" in last) == (last["finish_reason"] == "stop")
        found.append((last["finish_reason"], last.get("stop_reason"), last.get("matched_stop")))
    return found


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"return_token_ids": True}], ids=["", "scored", "ids"])
async def test_what_ended_a_choice(path: str, more: dict[str, Any]) -> None:
    """A stop string, a token that was asked for, the model's own end, or the limit."""
    if path == "/v1/chat/completions" and "logprobs" in more:
        more = {"logprobs": True}
    async with small_runtime(Dials(only_token_id=LETTER), eos_token_ids=(EOS,)) as runtime:
        client, letter = over_http(runtime), "a"
        for fields, expected in (
            ({}, ("length", None, None)),
            ({"stop": ["b", letter * 2]}, ("stop", letter * 2, letter * 2)),
            ({"stop_token_ids": [LETTER]}, ("stop", LETTER, LETTER)),
            ({"stop_token_ids": [LETTER], "include_stop_str_in_output": True}, ("stop", LETTER, LETTER)),
        ):
            assert await ends(client, path, **fields, **more) == [expected] * 2, fields
    async with small_runtime(Dials(only_token_id=EOS), eos_token_ids=(EOS,)) as runtime:
        assert await ends(over_http(runtime), path, **more) == [("stop", None, EOS)] * 2
