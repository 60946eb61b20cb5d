"""`quipu serve` with a model that reads images: texts, counts, preemption, and images that are refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from tests.e2e.servers import Server, serving
from tests.kernels.transformers_runner.seeing_models import FAMILIES, NUM_TOKENS
from tests.seeing import (
    PLACEHOLDER,
    TOKENS,
    WRITTEN,
    Checkpoint,
    chat_body,
    counts,
    data_url,
    drawn_url,
    greedy,
    make_seeing_checkpoint,
    png,
    prompt_of,
    said,
    seen,
)

BEFORE = "Look closely at what is shown here, and count the things that you can name. "
FIELDS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoints") / "seeing"
    return Checkpoint(make_seeing_checkpoint(folder, request.param), request.param)


@pytest.fixture(scope="module")
def server(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # steps that an image and the sequences beside it fill
    room = "--max-num-seqs", "8", "--max-num-batched-tokens", str(NUM_TOKENS + 8)
    flags = ("--executor", "transformers", "--num-blocks", "26", "--threads", "1", *room)
    with serving(tmp_path_factory.mktemp("seeing"), str(model.folder), *flags) as server:
        yield server


def test_texts_and_counts(model: Checkpoint, server: Server) -> None:
    """A chat about images has transformers' text, also when it is cached. Equal images hit; another one of the same
    size hits up to the block in which it begins."""
    tokens = prompt_of(model, BEFORE, " and ", " differ?")
    begin, second = tokens.index(PLACEHOLDER), len(tokens) - tokens[::-1].index(PLACEHOLDER) - NUM_TOKENS
    assert begin % 16 and begin > 16 and second > begin + NUM_TOKENS

    def ask(one: int, other: int, **fields: Any) -> dict[str, Any]:
        parts = said(BEFORE), seen(drawn_url(one)), said(" and "), seen(drawn_url(other)), said(" differ?")
        answer: dict[str, Any] = server.post("/v1/chat/completions", chat_body(*parts, **FIELDS, **fields)).json()
        return answer

    first, again = ask(1, 2), ask(1, 2)
    assert first["choices"][0]["message"]["content"] == greedy(model, tokens, 1, 2)
    assert again["choices"] == first["choices"]
    full = (len(tokens) - 1) // 16 * 16
    assert [counts(first), counts(again)] == [(len(tokens), at, 2 * NUM_TOKENS) for at in (0, full)]
    changed = ask(1, 3)
    assert counts(changed)[1] == second // 16 * 16
    assert changed["choices"][0]["message"]["content"] == greedy(model, tokens, 1, 3)
    assert counts(ask(4, 2))[1] == begin // 16 * 16
    both = ask(5, 2, n=2)
    assert both["choices"][0]["message"] == both["choices"][1]["message"]
    assert both["choices"][0]["message"]["content"] == greedy(model, tokens, 5, 2)


def test_preempted(server: Server) -> None:
    """Chats about images that preempt one another say what each says alone, and every count is exact."""
    bodies = [
        chat_body(seen(drawn_url(seed)), said(f" number {seed}"), **{**FIELDS, "max_tokens": 90}) for seed in range(4)
    ]
    alone = [server.post("/v1/chat/completions", body).json()["choices"] for body in bodies]
    before = server.wait_at_rest()["num_preemptions_total"]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: server.post("/v1/chat/completions", body).json()["choices"], bodies))
    assert together == alone
    metrics = server.wait_at_rest()
    assert metrics["num_preemptions_total"] > before and metrics["usage_disputed_total"] == 0


def test_other_apis(server: Server) -> None:
    """The same image in responses and messages is the same prompt, and cached; their errors name their fields."""
    url = drawn_url(7)
    data = url.partition(",")[2]
    num_prompt, _, image_tokens = counts(
        server.post("/v1/chat/completions", chat_body(said(BEFORE), seen(url), **FIELDS)).json()
    )
    full = (num_prompt - 1) // 16 * 16
    shown = {"type": "input_image", "image_url": url}
    turn = {"role": "user", "content": [{"type": "input_text", "text": BEFORE}, shown]}
    usage = server.post("/v1/responses", {"input": [turn], "max_output_tokens": 1}).json()["usage"]
    assert (usage["input_tokens"], image_tokens) == (num_prompt, NUM_TOKENS)
    told = usage["input_tokens_details"]
    assert (told["cached_tokens"], told["image_tokens"]) == (full, NUM_TOKENS)
    shown["image_url"] = "https://example.com/a.png"
    error = server.post("/v1/responses", {"input": [turn]}).json()["error"]
    assert error["param"] == "input[0].content[1].image_url"

    source = {"type": "base64", "media_type": "image/png", "data": data}
    message: dict[str, Any] = {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [said(BEFORE), {"type": "image", "source": source}]}],
    }
    usage = server.post("/v1/messages", message).json()["usage"]
    assert usage["cache_read_input_tokens"] == full
    assert usage["input_tokens"] + full + usage["cache_creation_input_tokens"] == num_prompt
    assert server.post("/v1/messages/count_tokens", message).json()["input_tokens"] == num_prompt
    for changed, path in (
        ({"data": "AAAA"}, "source.data"),
        ({"type": "url", "url": "https://example.com"}, "source.type"),
    ):
        message["messages"][0]["content"][1] = {"type": "image", "source": {**source, **changed}}
        response = server.post("/v1/messages", message)
        assert response.status_code == 400
        assert f"`messages.0.content.1.{path}`" in response.json()["error"]["message"]
    body = chat_body(said("a"), seen(url), truncate_prompt_tokens=20)
    assert server.post("/v1/chat/completions", body).json()["error"]["param"] == "truncate_prompt_tokens"


def test_results_of_tools(model: Checkpoint, server: Server) -> None:
    """An image in a tool's result is one of the prompt in all APIs: counted, cached, and refused by its field."""
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "data": drawn_url(9).partition(",")[2]}}
    told: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": BEFORE}, image],
    }
    message: dict[str, Any] = {
        "max_tokens": 1,
        "messages": [said_by("user", "Look."), said_by("assistant", [call]), said_by("user", [told])],
    }
    usage = server.post("/v1/messages", message).json()["usage"]
    total = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    told["content"].pop()
    num_shown = len(prompt_of(model, BEFORE, "")) - len(prompt_of(model, BEFORE))
    assert server.post("/v1/messages/count_tokens", message).json()["input_tokens"] == total - num_shown
    output = [{"type": "input_text", "text": BEFORE}, {"type": "input_image", "image_url": drawn_url(9)}]
    items: list[dict[str, Any]] = [
        said_by("user", "Look."),
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    usage = server.post("/v1/responses", {"input": items, "max_output_tokens": 1}).json()["usage"]
    details = usage["input_tokens_details"]
    assert (usage["input_tokens"], details["image_tokens"]) == (total, NUM_TOKENS)
    assert details["cached_tokens"] == (total - 1) // 16 * 16
    output[1]["image_url"] = "https://example.com/a.png"
    error = server.post("/v1/responses", {"input": items}).json()["error"]
    assert error["param"] == "input[2].output[1].image_url"
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = said_by("tool", [said(BEFORE), seen(drawn_url(9))]) | {"tool_call_id": "c1"}
    chat = [said_by("user", "Look."), {"role": "assistant", "tool_calls": [called]}, result]
    answer = server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1}).json()
    assert counts(answer) == (total, (total - 1) // 16 * 16, NUM_TOKENS)
    result["content"][1]["image_url"]["url"] = "https://example.com/a.png"
    error = server.post("/v1/chat/completions", {"messages": chat}).json()["error"]
    assert error["param"] == "messages[2].content[1].image_url.url"


def said_by(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def bomb(side: int) -> bytes:
    """Return a small PNG file that says that it has many pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://example.com/a.png", "no images are fetched"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,AAAA", "not a PNG, JPEG, WebP or GIF image"),
        (data_url(bomb(50_000)), "has 50000 x 50000 pixels"),
        (data_url(bomb(5_000)), "not a PNG, JPEG, WebP or GIF image"),
        (data_url(png(Image.new("RGB", (4, 100)))), "more than 20 times as long"),
    ],
)
def test_refused(server: Server, url: str, problem: str) -> None:
    """An image that cannot be served is named by its field."""
    response = server.post("/v1/chat/completions", chat_body(said("a"), seen(url)))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[1].image_url.url")
    assert problem in error["message"]


def test_placeholders_of_clients(model: Checkpoint, server: Server) -> None:
    """A text with one of the tokens of an image cannot take an image's place, nor end it."""
    for text in {WRITTEN[model.family], *TOKENS[model.family].values()}:
        response = server.post("/v1/chat/completions", chat_body(said(text), seen(drawn_url(1))))
        assert response.status_code == 400 and "1 images" in response.json()["error"]["message"]
