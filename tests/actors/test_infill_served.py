"""`suffix` and `/infill`: prompts with a gap, through every actor and over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.runtimes import BLOCK, Client, full_blocks, small_runtime
from tests.tiny import TINY
from tests.traps.wire import COMPLETIONS, over_http, settle
from tests.vocabularies import Vocabulary

INFILL = "/infill"
TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BEFORE, AFTER = "def knots(cord):\n    return " * BLOCK, "\n\nprint(knots(3))\n" * 2
START = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny checkpoint with tokens for gaps, and with one that stands before every text."""
    folder = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("infill") / "model"))
    source = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = source["model"]["vocab"], source["model"]["merges"]
    for token in TOKENS:
        name = "".join(merges.pop())
        number = vocabulary.pop(name)
        source["added_tokens"].append({**source["added_tokens"][0], "id": number, "content": token})
    begin = {"id": "<|endoftext|>", "ids": [START], "tokens": ["<|endoftext|>"]}
    source["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": begin},
    }
    source["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(source))
    return folder


async def post(client: Client, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    exchange, answer = await over_http(client).post(path, fields)
    assert exchange.status == status, answer
    return dict(answer)


async def test_gaps(model: Path, autojump_clock: trio.abc.Clock) -> None:
    """The prompt is that of the model, and counted as it is; sent again, also to the other endpoint, it is cached. A
    look-up finds it, and one that is too long for the context is refused with all of its tokens.
    """
    library = Vocabulary(model).library
    ids = {token: library.tokenizer.token_to_id(token) for token in TOKENS}
    prefix, suffix, middle = ids.values()

    def expected(before: str, after: str) -> list[int]:
        texts = (library.list_ids(text, add_special_tokens=False) for text in (before, after))
        return [START, prefix, *next(texts), suffix, *next(texts), middle]

    prompt = expected(BEFORE, AFTER)
    kept: dict[str, Any] = {"temperature": 0, "suffix": AFTER, "max_tokens": 2}
    async with small_runtime(model_path=str(model)) as client:
        first = await post(client, COMPLETIONS, prompt=[BEFORE, "x ="], return_token_ids=True, **kept)
        asked = {"model": "demo", "prompt": BEFORE, **kept}
        found = await post(client, "/v1/cache/lookup", url=COMPLETIONS, body=asked)
        again = await post(client, INFILL, input_prefix=BEFORE[:5], prompt=BEFORE[5:], input_suffix=AFTER, n_predict=2)
        _, events = await over_http(client).stream(
            INFILL, {"input_prefix": "x =", "input_suffix": "", "n_predict": 1, "stream": True}
        )
        long = await post(client, COMPLETIONS, 400, prompt=BEFORE, suffix="\n\nx" * 60 * BLOCK)
        await settle(client)
    assert [choice["prompt_token_ids"] for choice in first["choices"]] == [prompt, expected("x =", AFTER)]
    assert first["usage"]["prompt_tokens"] == len(prompt) + len(expected("x =", AFTER))
    cached = full_blocks(len(prompt) - 1)
    assert (found["prompts"][0]["prompt_tokens"], found["prompts"][0]["cached_tokens"]) == (len(prompt), cached)
    assert (again["tokens_evaluated"], again["tokens_cached"]) == (len(prompt), cached) and cached > 0
    assert events[-1]["tokens_evaluated"] == len(expected("x =", ""))
    assert (long["error"]["param"], long["error"]["code"]) == ("prompt", "context_length_exceeded")
    assert str(len(expected(BEFORE, "\n\nx" * 60 * BLOCK))) in long["error"]["message"]


@pytest.mark.parametrize("echo", [False, True])
async def test_without_special_tokens(model: Path, autojump_clock: trio.abc.Clock, *, echo: bool) -> None:
    """A text that has all of its tokens itself gets none before it, however it is encoded or shortened; a look-up sees
    the same prompt. A prompt with a gap always gets them.
    """
    ids = Vocabulary(model).library.list_ids(BEFORE, add_special_tokens=False)
    bare: dict[str, Any] = {"prompt": BEFORE, "add_special_tokens": False, "max_tokens": 1, "temperature": 0}
    shorter = {} if echo else {"truncate_prompt_tokens": 20}
    async with small_runtime(model_path=str(model)) as client:
        answer = await post(client, COMPLETIONS, return_token_ids=True, **bare, echo=echo, **shorter)
        usual = await post(client, COMPLETIONS, return_token_ids=True, **{**bare, "add_special_tokens": True})
        found = await post(client, "/v1/cache/lookup", url=COMPLETIONS, body={"model": "demo", **bare})
        gap = await post(client, COMPLETIONS, 400, **bare, suffix=AFTER)
        await settle(client)
    assert answer["choices"][0]["prompt_token_ids"] == (ids if echo else ids[-20:])
    assert usual["choices"][0]["prompt_token_ids"] == [START, *ids]
    assert found["prompts"][0]["prompt_tokens"] == len(ids)
    assert gap["error"]["param"] == "add_special_tokens"


async def test_no_tokens_for_gaps(autojump_clock: trio.abc.Clock) -> None:
    """Where the tokenizer has none, the error names the client's field."""
    async with small_runtime() as client:
        for path, fields, param in (
            (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
            (INFILL, {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ):
            error = (await post(client, path, 400, **fields))["error"]
            assert (error["param"], error["code"]) == (param, "unsupported_parameter"), error
        await settle(client)
