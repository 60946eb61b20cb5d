"""Embeddings and a reranker's scores through whole servers, compared with sentence-transformers on the same checkpoint.

Checkpoints are what sentence-transformers saves of the tiny model: `--task auto` reads from their files what to do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quipu.actors.messages.prompts import TextPrompt
from quipu.actors.request_desk.interface import VectorInfo
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
    # here, because loading it takes a second, and all workers load this file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

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


@attrs.frozen
class Reranker:
    oracle: Any
    """A `sentence_transformers.CrossEncoder`."""
    server: Server
    has_template: bool


PAIR_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Never.{% endif %}Is it so?"
)


@pytest.fixture(scope="module", params=[False, True], ids=["own words", "template"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reranker]:
    """A reranker of sentence-transformers, with a template for pairs or without, and a server of it."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    folder = tmp_path_factory.mktemp("reranker")
    states: Any = {"text": {"method": "forward", "method_output_name": "logits"}}
    if request.param:
        states["message"] = {**states["text"], "format": "flat"}
    told = {"modality_config": states}
    loaded = {"transformer_task": "text-generation", "model_kwargs": {"dtype": "float32"}}
    transformer = Transformer(str(TINY), module_output_name="causal_logits", **told, **loaded)
    named = {"prompts": {"search": "Search."}, "default_prompt_name": "search"} if request.param else {}
    if request.param:
        transformer.tokenizer.chat_template = PAIR_TEMPLATE
    model = CrossEncoder(modules=[transformer, LogitScore(301, 77)], device="cpu", **named)
    model.save(str(folder / "model"))
    for path in TINY.iterdir():  # what a tokenizer needs
        if not (folder / "model" / path.name).exists():
            shutil.copy(path, folder / "model")
    if not request.param:
        _override_as_vllm(folder / "model" / "config.json")
    flags = ("--served-model-name", "demo", "--executor", "auto", "--dtype", "float32", "--num-blocks", "100")
    with serving(folder / "home", str(folder / "model"), *flags) as server:
        yield Reranker(model, server, request.param)


def _override_as_vllm(path: Path) -> None:
    """Write what vLLM is told of an original Qwen3-Reranker into its configuration."""
    config = json.loads(path.read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    path.write_text(json.dumps(config | {"classifier_from_token": ["no", "yes"]}))


async def prompts_of(documents: list[str], query: str) -> list[str]:
    """Return the prompts by which a reranker is asked."""
    info: Any = mock.Mock(task="score", vectors=VectorInfo())
    pairs: ScoredPairs = await make_pairs([query], documents, None, ("query", "documents"), info)
    return [prompt.text for prompt in pairs.prompts if isinstance(prompt, TextPrompt)]


async def test_scores_of_sentence_transformers(reranker: Reranker) -> None:
    """A reranker's scores are the oracle's for the same prompts, or for the same pairs if it has a template."""
    query, server = "What are cords?", reranker.server
    asked = [(prompt, "") for prompt in await prompts_of(TEXTS, query)]
    if reranker.has_template:
        asked = [(query, text) for text in TEXTS]
    expected = [float(reranker.oracle.predict([pair])[0]) for pair in asked]
    ranked = server.post("/v1/rerank", {**MODEL, "query": "What are cords?", "documents": TEXTS})
    assert ranked.status_code == 200, ranked.text
    scores = {result["index"]: result["relevance_score"] for result in ranked.json()["results"]}
    assert [scores[at] for at in range(len(TEXTS))] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == len(expected)
    shortened = {"query": query, "documents": TEXTS, "truncate_prompt_tokens": 100}
    assert server.post("/v1/rerank", MODEL | shortened).status_code == (400 if reranker.has_template else 200)


async def test_scores_of_a_classifier(tmp_path: Path) -> None:
    """A checkpoint with a `score.weight` scores pairs as transformers' classifier does in float32, and ranks them."""
    torch.manual_seed(3)
    oracle = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(oracle.score.weight, std=0.3)
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    oracle.save_pretrained(tmp_path / "model")
    query, tokenizer = "What are cords?", AutoTokenizer.from_pretrained(TINY)
    with torch.inference_mode():
        logits = [oracle(**tokenizer(asked, return_tensors="pt")).logits for asked in await prompts_of(TEXTS, query)]
    expected = torch.cat(logits)[:, 0].sigmoid().tolist()
    flags = ("--served-model-name", "demo", "--executor", "reference", "--dtype", "float32", "--num-blocks", "100")
    with serving(tmp_path / "home", str(tmp_path / "model"), *flags) as server:
        scored = server.post("/v1/score", {**MODEL, "text_1": query, "text_2": TEXTS}).json()["data"]
        ranked = server.post("/v1/rerank", {**MODEL, "query": query, "documents": TEXTS}).json()["results"]
    scores = [item["score"] for item in scored]
    assert scores == pytest.approx(expected, abs=1e-5) and max(expected) - min(expected) > 0.01
    order = sorted(range(len(TEXTS)), key=scores.__getitem__, reverse=True)
    assert [(item["index"], item["relevance_score"]) for item in ranked] == [(at, scores[at]) for at in order]
