"""Embeddings and a reranker's scores through whole servers, compared with sentence-transformers on the same checkpoint.

Checkpoints are what sentence-transformers saves of the tiny model: `--task auto` reads from their files what to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling

from quipu.actors.messages.prompts import TextPrompt
from quipu.web.api.openai.scored_pairs import ScoredPairs, make_pairs
from tests.e2e.servers import Server, serving
from tests.tiny import TINY, full_blocks

TEXTS = [
    "The khipukamayuq read cords with their fingers: position, colour and knots gave numbers and names. " * 3,
    "A cord.",
    "Rain fell on the terraces for nine days.",
]
MODEL = {"model": "demo"}


@pytest.fixture(scope="module", params=["lasttoken", "mean"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A checkpoint of sentence-transformers, and a server of it, with an engine on the reference or the CPU kernels."""
    folder = tmp_path_factory.mktemp(request.param)
    states = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    told = {"modality_config": states, "module_output_name": "token_embeddings"}  # texts are not put into a template
    transformer = Transformer(str(TINY), model_kwargs={"dtype": "float32"}, **told)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), request.param), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(folder / "model"))
    _mark_matryoshka(folder / "model")
    executor = "auto" if request.param == "lasttoken" else "reference"
    flags = ("--served-model-name", "demo", "--executor", executor, "--dtype", "float32", "--num-blocks", "100")
    with serving(folder / "home", str(folder / "model"), *flags) as server:
        yield request.param, model, server


def _mark_matryoshka(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("{", '{"matryoshka_dimensions": [16, 48],', 1))


def test_vectors_of_sentence_transformers(embedder: Any) -> None:
    """Base64, as OpenAI's client asks for, and floats are the oracle's vectors; those of last tokens read the cache."""
    pooling, model, server = embedder
    expected = model.encode(TEXTS, batch_size=1)
    lengths = [len(model.tokenizer(text)["input_ids"]) for text in TEXTS]
    with server.client() as client:
        packed = client.embeddings.create(**MODEL, input=TEXTS)
        floats = client.embeddings.create(**MODEL, input=TEXTS, encoding_format="float")
    for answer in (packed, floats):
        ours = np.array([item.embedding for item in answer.data])
        print(np.abs(ours - expected).max())
        assert np.abs(ours - expected).max() < 2e-5
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
    cached = sum(full_blocks(length - 1) for length in lengths) if pooling == "lasttoken" else 0
    told = [answer.usage.model_extra["prompt_tokens_details"]["cached_tokens"] for answer in (packed, floats)]
    assert told == [0, cached]


def test_dimensions(embedder: Any) -> None:
    """A vector is cut to a length that the checkpoint lists, and scaled; other lengths are refused."""
    _, model, server = embedder
    expected = model.encode(TEXTS[0], truncate_dim=48, normalize_embeddings=True)
    with server.client() as client:
        answer = client.embeddings.create(**MODEL, input=TEXTS[0], dimensions=48)
        with pytest.raises(openai.BadRequestError, match="one of 16, 48"):
            client.embeddings.create(**MODEL, input=TEXTS[0], dimensions=47)
    assert np.abs(np.array(answer.data[0].embedding) - expected).max() < 2e-5


def test_similarity(embedder: Any) -> None:
    """`/score` gives the oracle's cosines, and `/rerank` sorts by them."""
    _, model, server = embedder
    expected = model.similarity(*(model.encode(texts, batch_size=1) for texts in (TEXTS[:1], TEXTS)))[0]
    scores = server.post("/score", {**MODEL, "text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    assert [item["score"] for item in scores] == pytest.approx(expected.tolist(), abs=1e-5)
    ranked = server.post("/v2/rerank", {**MODEL, "query": TEXTS[0], "documents": TEXTS}).json()["results"]
    assert [result["index"] for result in ranked] == expected.argsort(descending=True).tolist()


def test_records_have_a_kind(embedder: Any) -> None:
    """A request's record says what was asked for, and counts no completion."""
    _, _, server = embedder
    for path, body, kind in (
        ("/v1/embeddings", {"input": "x"}, "embed"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "score"),
    ):
        response = server.post(path, MODEL | body)
        record = server.get(f"/v1/usage/{response.headers['x-quipu-request-id']}").json()
        assert (record["kind"], record["completion_tokens"]) == (kind, 0)
    refused = server.complete("x")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "task_not_served"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CrossEncoder, Server]]:
    """A reranker of sentence-transformers, and a server of it."""
    folder = tmp_path_factory.mktemp("reranker")
    told = {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}
    loaded = {"transformer_task": "text-generation", "model_kwargs": {"dtype": "float32"}}
    transformer = Transformer(str(TINY), module_output_name="causal_logits", **told, **loaded)
    model = CrossEncoder(modules=[transformer, LogitScore(301, 77)], device="cpu")
    model.save(str(folder / "model"))
    for path in TINY.iterdir():  # what a tokenizer needs
        if not (folder / "model" / path.name).exists():
            shutil.copy(path, folder / "model")
    flags = ("--served-model-name", "demo", "--executor", "auto", "--dtype", "float32", "--num-blocks", "100")
    with serving(folder / "home", str(folder / "model"), *flags) as server:
        yield model, server


async def prompts_of(documents: list[str], query: str) -> list[str]:
    """Return the prompts by which a reranker is asked."""
    info: Any = type("Info", (), {"task": "score"})
    pairs: ScoredPairs = await make_pairs([query], documents, None, "documents", info)
    return [prompt.text for prompt in pairs.prompts if isinstance(prompt, TextPrompt)]


async def test_scores_of_sentence_transformers(reranker: tuple[CrossEncoder, Server]) -> None:
    """A reranker's scores are the oracle's for the same prompts."""
    model, server = reranker
    asked = await prompts_of(TEXTS, "What are cords?")
    expected = [float(model.predict([(prompt, "")])[0]) for prompt in asked]
    ranked = server.post("/v1/rerank", {**MODEL, "query": "What are cords?", "documents": TEXTS})
    assert ranked.status_code == 200, ranked.text
    scores = {result["index"]: result["relevance_score"] for result in ranked.json()["results"]}
    assert [scores[at] for at in range(len(TEXTS))] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == len(expected)
