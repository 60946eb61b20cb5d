"""The demo model, served as shipped: its answers are mostly right, and usage tells what was read from the cache.

Answers differ slightly between processors, so a few of them may be wrong; those to a cached prompt may not differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from bench.demo_judges import is_consistent, is_right
from bench.demo_rows import long_document
from quipu.kernels.demo.chat_encoder import ChatEncoder
from quipu.kernels.demo.text.chat_mixture import HELD_OUT
from quipu.kernels.demo.text.facts import Fact
from quipu.kernels.demo.text.pirate import has_tone
from quipu.kernels.demo.text.recall import document_message
from tests.e2e.servers import BLOCK, Server, serving

RANDOM = Random(f"e2e {HELD_OUT}")
DOCUMENT = long_document(RANDOM, ChatEncoder())
SYSTEM = str(document_message(RANDOM, DOCUMENT)["content"])
ASKED = RANDOM.sample(DOCUMENT.facts, 8)
QUESTIONS = [fact.question(RANDOM) for fact in ASKED]
MOST = 6
"""How many of the eight answers must be right."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("demo"), "demo", "--lora-modules", "pirate=demo-pirate") as server:
        yield server
        server.wait_at_rest()


def num_right(answers: list[str]) -> int:
    return sum(is_right(fact, answer) for fact, answer in zip(ASKED, answers, strict=True))


def test_chat(demo: Server) -> None:
    """Most answers in a chat about a document are right, and all earlier turns are cached."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers, told = [], 0
    with demo.client() as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer: Any = client.chat.completions.create(model="demo", messages=messages, temperature=0)
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.prompt_tokens_details.cached_tokens == told // BLOCK * BLOCK
            told = answer.usage.total_tokens - 1  # the last token of an answer is never computed
            answers.append(answer.choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert num_right(answers) >= MOST, answers


def test_all_apis_read_the_same_document(demo: Server) -> None:
    """Streamed or not, over all APIs, answers are the same and mostly right, and the document comes from the cache."""
    answers: dict[str, list[str]] = {"chat": [], "messages": [], "responses": []}
    with demo.client() as openai_client, demo.anthropic_client() as claude:
        for question in QUESTIONS:
            asked: list[Any] = [{"role": "user", "content": question}]
            stream = openai_client.chat.completions.create(
                model="demo", messages=[{"role": "system", "content": SYSTEM}, *asked], temperature=0, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = list(stream)
            answers["chat"].append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
            with claude.messages.stream(
                model="demo", system=SYSTEM, messages=asked, max_tokens=64, extra_body={"temperature": 0}
            ) as message_stream:
                message = message_stream.get_final_message()
            answers["messages"].append("".join(block.text for block in message.content if block.type == "text"))
            response = openai_client.responses.create(model="demo", instructions=SYSTEM, input=question, temperature=0)
            answers["responses"].append(response.output_text)
            (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
            details, response_usage = usage.prompt_tokens_details, response.usage
            assert details is not None and response_usage is not None
            assert min(details.cached_tokens or 0, message.usage.cache_read_input_tokens or 0) > 1000
            assert response_usage.input_tokens_details.cached_tokens > 1000 or question == QUESTIONS[0]
    assert answers["chat"] == answers["messages"] == answers["responses"]
    assert num_right(answers["chat"]) >= MOST, answers["chat"]


def test_another_tenants_document_is_not_read(demo: Server) -> None:
    """Questions about another document are never answered with a fact that only the first one has."""
    random = Random("another")
    other = long_document(random, ChatEncoder())
    known = {(fact.person, fact.relation.name): fact for fact in other.facts}
    shared = [(fact, known[key]) for fact in DOCUMENT.facts if (key := (fact.person, fact.relation.name)) in known]
    asked: list[Fact] = [theirs for _, theirs in shared] or list(other.facts[:4])
    body = {"model": "demo", "temperature": 0, "cache_salt": "another"}
    system = document_message(random, other)
    for fact in asked:
        messages = [system, {"role": "user", "content": fact.question(random)}]
        response = demo.post("/v1/chat/completions", body | {"messages": messages}).json()
        text = response["choices"][0]["message"]["content"]
        assert text not in {fact.statement for fact in DOCUMENT.facts} - {fact.statement for fact in other.facts}


def test_tone_of_the_adapter(demo: Server) -> None:
    """Most answers with the adapter have its tone, none of the model's has, and neither reads the other's cache."""
    in_tone = []
    for model in ("demo", "pirate"):
        for question in ("What is a quipu?", "What are you?", "What is a token?", "Tell me a joke.", *QUESTIONS[:4]):
            messages = [{"role": "system", "content": SYSTEM}] if question in QUESTIONS else []
            messages.append({"role": "user", "content": question})
            body = {"model": model, "messages": messages, "temperature": 0, "cache_salt": "tone"}
            answer = demo.post("/v1/chat/completions", body).json()
            if question == QUESTIONS[0]:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            in_tone.append(has_tone(answer["choices"][0]["message"]["content"]))
    assert not any(in_tone[:8]) and sum(in_tone[8:]) >= 6, in_tone


def test_story(demo: Server) -> None:
    """Most stories are consistent, and each ends by itself."""
    good = 0
    for seed, (hero, helper) in enumerate([("Mira", "Otto"), ("Hugo", "Vera"), ("Emma", "Paul"), ("Leo", "Ada")]):
        messages = [{"role": "user", "content": f"Tell me a story about {hero} and {helper}."}]
        response = demo.post("/v1/chat/completions", {"model": "demo", "messages": messages, "seed": seed}).json()
        assert response["choices"][0]["finish_reason"] == "stop"
        good += is_consistent(response["choices"][0]["message"]["content"])
    assert good >= 3
