"""Embeddings, scores and reranking over HTTP, through every actor, with the fake backend."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import trio

from quipu.actors.config.pooling_config import PoolingConfig
from quipu.kernels.fake import Dials
from quipu.web.api.openai.scored_pairs import MAX_PROMPT_CHARS
from tests.fake_oracle import embedding
from tests.runtimes import MAX_MODEL_LEN, Client, small_runtime
from tests.tiny import TINY, full_blocks
from tests.traps.wire import over_http, settle
from tests.vocabularies import Vocabulary

EMBED: dict[str, Any] = {"task": "embed"}
SCORE: dict[str, Any] = {"task": "score", "pooling": PoolingConfig(score_token_ids=(3, 9))}
TEXTS = ["A cord with a knot, and another knot, and many more of them.", "A cord with a knot.", "Rain."]
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
RERANKS = ("/v1/rerank", "/rerank", "/v2/rerank")


async def post(client: Client, path: str, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    exchange, answer = await over_http(client).post(path, {"model": "demo", **fields})
    assert exchange.status == status, answer
    return dict(answer)


VOCABULARY = Vocabulary(TINY)


def ids_of(text: str) -> list[int]:
    return VOCABULARY.encode(text)


def vector(text: str, **fields: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(embedding(ids_of(text), **fields), np.float32)


async def test_floats_and_base64(autojump_clock: trio.abc.Clock) -> None:
    """Both encodings have the same bits, in the order of the inputs; the second time all of it is cached."""
    async with small_runtime(**EMBED) as client:
        floats = await post(client, "/v1/embeddings", input=TEXTS)
        packed = await post(client, "/v1/embeddings", input=TEXTS, encoding_format="base64", user="x")
    for at, text in enumerate(TEXTS):
        given = floats["data"][at]
        assert (given["index"], given["object"]) == (at, "embedding")
        assert np.array_equal(np.array(given["embedding"], np.float32), vector(text))
        assert b64decode(packed["data"][at]["embedding"]) == vector(text).tobytes()
    lengths = [len(ids_of(text)) for text in TEXTS]
    assert floats["usage"]["prompt_tokens"] == floats["usage"]["total_tokens"] == sum(lengths)
    assert floats["object"] == "list" and floats["model"] == "demo"
    cached = packed["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sum(full_blocks(length - 1) for length in lengths) > 0


@pytest.mark.parametrize("given", ["text", "texts", "ids", "lists of ids"])
async def test_kinds_of_input(autojump_clock: trio.abc.Clock, given: str) -> None:
    """A text, a list of texts, token ids, and lists of them are all inputs."""
    ids = ids_of(TEXTS[0])
    kinds: dict[str, Any] = {"text": TEXTS[0], "texts": [TEXTS[0]], "ids": ids, "lists of ids": [ids]}
    async with small_runtime(**EMBED) as client:
        answer = await post(client, "/v1/embeddings", input=kinds[given], dimensions=5)
    (only,) = answer["data"]
    assert np.array_equal(np.array(only["embedding"], np.float32), vector(TEXTS[0], dimensions=5))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": [5000]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x " * 9000}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 17}, "dimensions"),
        ({"input": "x", "dimensions": "a"}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "model": "none"}, "model"),
    ],
)
async def test_bad_bodies(autojump_clock: trio.abc.Clock, fields: dict[str, Any], param: str) -> None:
    """What is wrong with a body is a 4xx that names the field."""
    async with small_runtime(**EMBED) as client:
        exchange, answer = await over_http(client).post("/v1/embeddings", {"model": "demo", **fields})
        assert exchange.status in (400, 404) and answer["error"]["param"] == param, answer
        await settle(client)


async def test_unknown_fields_are_named(autojump_clock: trio.abc.Clock) -> None:
    """Fields that no embedding has are named as ignored."""
    async with small_runtime(**EMBED) as client:
        exchange, _ = await over_http(client).post(
            "/v1/embeddings", {"model": "demo", "input": "x", "temperature": 1, "colour": 2}
        )
    assert exchange.headers["x-quipu-ignored-fields"] == "temperature,colour"


@pytest.mark.parametrize("settings", [EMBED, SCORE], ids=["embed", "score"])
async def test_instruction_without_effect_is_named(autojump_clock: trio.abc.Clock, settings: dict[str, Any]) -> None:
    """A reranker is told the instruction; to an embedding model it says nothing, and the client hears so."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/score": {"text_1": TEXTS[0], "text_2": TEXTS},
        "/v1/rerank": {"query": TEXTS[0], "documents": TEXTS},
    }
    async with small_runtime(**settings) as client:
        for path, body in bodies.items():
            told = {"model": "demo", "instruction": "Find knots.", **body}
            exchange, _ = await over_http(client).post(path, told)
            named = exchange.headers.get("x-quipu-ignored-fields")
            assert named == ("instruction" if settings is EMBED else None)
            exchange, _ = await over_http(client).post(path, {**told, "instruction": ""})
            assert exchange.headers.get("x-quipu-ignored-fields") is None


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_of_embeddings(autojump_clock: trio.abc.Clock, path: str) -> None:
    """An embedding model scores by cosine; each text is one prompt, however many pairs it is in."""
    async with small_runtime(**EMBED) as client:
        answer = await post(client, path, text_1=TEXTS[0], text_2=TEXTS)
        pairs = await post(client, path, text_1=TEXTS, text_2=TEXTS[::-1])
        one = await post(client, path, text_1=TEXTS[0], text_2=TEXTS[1])
    expected = [float(vector(TEXTS[0]).astype(float) @ vector(text)) for text in TEXTS]
    assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert answer["data"][0]["score"] == pytest.approx(1) and answer["data"][0]["object"] == "score"
    mirrored = [float(vector(a).astype(float) @ vector(b)) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [item["score"] for item in pairs["data"]] == pytest.approx(mirrored, abs=1e-6)
    assert [item["score"] for item in one["data"]] == pytest.approx(expected[1:2], abs=1e-6)
    lengths = [len(ids_of(text)) for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == lengths[0] + sum(lengths)


NAMES = [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]


async def test_names_of_scored_texts(autojump_clock: trio.abc.Clock) -> None:
    """The texts of scores have each of vLLM's names for them, and errors use the client's. Names are not mixed."""
    async with small_runtime(**EMBED) as client:
        answers = [await post(client, "/score", **{one: TEXTS[0], other: TEXTS}) for one, other in NAMES]
        longer = await post(client, "/score", status=400, queries=TEXTS[:2], items=TEXTS)
        half = await post(client, "/score", status=400, queries=TEXTS[0])
        mixed = await post(client, "/score", status=400, text_1=TEXTS[0], documents=TEXTS)
        await settle(client)
    assert all(answer["data"] == answers[0]["data"] for answer in answers)
    assert [error["error"]["param"] for error in (longer, half, mixed)] == ["queries", "documents", "documents"]


ALTERED: dict[str, list[tuple[str, Any, Any]]] = {
    "/v1/embeddings": [
        ("embed_dtype", "float16", "float32"),
        ("endianness", "big", "little"),
        ("messages", [{"role": "user", "content": "x"}], None),
        ("normalize", False, True),
    ],
    "/v1/score": [("chat_template_kwargs", {"instruction": "x"}, {})],
    "/v1/rerank": [("rank_fields", ["title", "text"], ["text"])],
}
EVERYWHERE = [
    ("add_special_tokens", False, True),
    ("chat_template", "x", ""),
    ("padding", "max_length", "do_not_pad"),
    ("use_activation", False, True),
]
OF_TEXTS = [("max_tokens_per_doc", 5, 6), ("max_tokens_per_doc", 1, 0), ("max_tokens_per_query", 1, 2)]


@pytest.mark.parametrize("path", sorted(ALTERED))
async def test_fields_that_change_answers(autojump_clock: trio.abc.Clock, path: str) -> None:
    """Fields of vLLM's that would change a vector or a score are refused by name, unless they ask for nothing.

    A limit on single texts asks for nothing if they cannot be longer.
    """
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "\u00e9\u00e9"},
        "/v1/score": {"text_1": "\u00e9", "text_2": ["x", "\u00e9\u00e9\u00e9"]},
        "/v1/rerank": {"query": "\u00e9", "documents": ["x", "\u00e9\u00e9\u00e9"]},
    }
    of_texts = [] if path == "/v1/embeddings" else OF_TEXTS
    async with small_runtime(**EMBED) as client:
        plain = await post(client, path, **bodies[path])
        for name, altering, neutral in (*EVERYWHERE, *ALTERED[path], *of_texts):
            refused = await post(client, path, status=400, **bodies[path], **{name: altering})
            assert (refused["error"]["param"], refused["error"]["code"]) == (name, "unsupported_parameter")
            same = await post(client, path, **bodies[path], **{name: neutral})
            assert same.get("data", same.get("results")) == plain.get("data", plain.get("results"))
        await settle(client)


async def test_one_document(autojump_clock: trio.abc.Clock) -> None:
    """A text in place of a list of documents is one of them, as in vLLM."""
    async with small_runtime(**EMBED) as client:
        one, listed = [await post(client, "/rerank", query="x", documents=given) for given in (TEXTS[0], [TEXTS[0]])]
    assert one["results"] == listed["results"] and len(one["results"]) == 1


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("settings", [EMBED, SCORE], ids=["embed", "score"])
async def test_reranking(autojump_clock: trio.abc.Clock, path: str, settings: dict[str, Any]) -> None:
    """Documents come best first, at most `top_n`, with their texts if wanted; scores are those of `/score`."""
    documents: list[Any] = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    async with small_runtime(**settings, max_model_len=3000, num_blocks=800) as client:
        scores = await post(client, "/score", text_1="Knots?", text_2=TEXTS)
        answer = await post(client, path, query="Knots?", documents=documents)
        top = await post(client, path, query="Knots?", documents=documents, top_n=1, return_documents=True)
    expected = sorted(((item["score"], -item["index"]) for item in scores["data"]), reverse=True)
    ranked = [(result["relevance_score"], -result["index"]) for result in answer["results"]]
    assert ranked == expected and len(ranked) == 3
    assert [TEXTS[result["index"]] for result in top["results"]] == [top["results"][0]["document"]["text"]]
    assert ("document" in answer["results"][0]) == (path != "/v2/rerank")
    assert ("meta" in answer) == (path == "/v2/rerank")
    assert answer["usage"]["prompt_tokens"] == scores["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_reranker_counts_each_pair(autojump_clock: trio.abc.Clock) -> None:
    """A reranker's usage is the sum over one prompt for each pair, whose common beginning is computed once."""
    async with small_runtime(**SCORE, max_model_len=3000, num_blocks=800) as client:
        answer = await post(client, "/v1/rerank", query="Knots?", documents=TEXTS, instruction="Find cords.")
        single = [(await post(client, "/score", text_1="Knots?", text_2=t, instruction="Find cords.")) for t in TEXTS]
        await settle(client)
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in single)
    assert [one["data"][0]["score"] for one in single] == [
        result["relevance_score"] for result in sorted(answer["results"], key=lambda result: result["index"])
    ]
    assert all(0 < result["relevance_score"] < 1 for result in answer["results"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": "x"}, "text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
        ("/score", {"text_1": [1], "text_2": ["x"]}, "text_1"),
        ("/score", {"text_1": "x", "text_2": ["x"] * 2048}, "text_2"),
        ("/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/rerank", {"documents": ["x"]}, "query"),
        ("/rerank", {"query": "", "documents": ["x"]}, "query"),
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": ["x", {"txt": "y"}]}, "documents[1]"),
        ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x", "documents": ["x"], "instruction": "x" * 5000}, "instruction"),
        ("/v2/rerank", {"query": "x" * (MAX_PROMPT_CHARS // 100), "documents": ["x"] * 101}, "documents"),
    ],
)
async def test_bad_pairs(autojump_clock: trio.abc.Clock, path: str, fields: dict[str, Any], param: str) -> None:
    """What is wrong with a body is a 400 that names the field; a query cannot be multiplied beyond a body's size."""
    async with small_runtime(**SCORE) as client:
        answer = await post(client, path, status=400, **fields)
        assert answer["error"]["param"] == param, answer
        await settle(client)


@pytest.mark.parametrize("text", ["", "a knot, " * MAX_MODEL_LEN, "knots" * (1 << 20)], ids=["empty", "long", "huge"])
@pytest.mark.parametrize(
    ("path", "one", "other"),
    [("/score", "data_1", "data_2"), ("/rerank", "query", "documents")],
    ids=["score", "rerank"],
)
async def test_text_without_an_embedding_is_named(
    autojump_clock: trio.abc.Clock, path: str, one: str, other: str, text: str
) -> None:
    """A text that is empty or too long to be embedded is a 400 that names its own field, not that of the others."""
    async with small_runtime(**EMBED) as client:
        for fields, param in (({one: text, other: ["x"]}, one), ({one: "x", other: ["x", text]}, other)):
            error = (await post(client, path, status=400, **fields))["error"]
            assert error["param"] == param and f"`{param}`" in error["message"]
        await settle(client)


@pytest.mark.parametrize("path", [*GENERATING, "/v1/embeddings", "/v1/score", *RERANKS])
@pytest.mark.parametrize("task", ["generate", "embed", "score"])
async def test_other_tasks(autojump_clock: trio.abc.Clock, task: str, path: str) -> None:
    """What a server was not started for is a 400 that says which flag would serve it, before the body is read."""
    served = {
        "generate": GENERATING,
        "embed": ("/v1/embeddings", "/v1/score", *RERANKS),
        "score": ("/v1/score", *RERANKS),
    }
    async with small_runtime(task=task) as client:
        exchange, answer = await over_http(client).post(path, {"model": "demo"})
        models = (await over_http(client).get("/v1/models"))[1]
    refused = "needs one that was started with `--task" in answer["error"]["message"]
    assert exchange.status == 400 and refused == (path not in served[task])
    assert [model["id"] for model in models["data"]] == ["demo"]


async def test_failed_input(autojump_clock: trio.abc.Clock) -> None:
    """One input that cannot be computed fails its request with the reason; the record says so, and nothing is left."""
    bad = ids_of(TEXTS[2])[-1]
    async with small_runtime(Dials(nan_token_id=bad), **EMBED) as client:
        answer = await post(client, "/v1/embeddings", status=500, input=TEXTS)
        await settle(client)
    assert "NaN" in answer["error"]["message"]


async def test_longest_answer(autojump_clock: trio.abc.Clock) -> None:
    """The most inputs that a request may have are answered, each with its own vector."""
    prompts = [[at, at + 1, at + 2] for at in range(2048)]
    async with small_runtime(**EMBED, max_waiting_requests=512) as client:
        answer = await post(client, "/v1/embeddings", input=prompts)
    for at, prompt in enumerate(prompts):
        given = np.array(answer["data"][at]["embedding"], np.float32)
        assert given.tobytes() == embedding(prompt)
    assert answer["usage"]["prompt_tokens"] == 3 * 2048
