"""Logprobs as the official client gets them from a real server and model, across the process boundary."""

from __future__ import annotations

from typing import Any

import openai

from tests.e2e.prompts import text_prompt, vocabulary
from tests.e2e.servers import Server, cached_of

GREEDY = {"model": "demo", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


def lists_of(answer: Any) -> tuple[Any, Any, Any]:
    logprobs = answer.choices[0].logprobs
    return logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs


def test_echo_matches_generation(client: openai.OpenAI) -> None:
    """A prompt followed by its output, scored as a prompt, has the logprobs that generation had."""
    prompt = vocabulary.encode(text_prompt("logprobs", 40))
    texts = [vocabulary.decoder.token_text(token_id).text for token_id in range(vocabulary.tokenizer.get_vocab_size())]
    # only tokens that can be identified by their text
    ids = {text: token_id for token_id, text in enumerate(texts) if texts.count(text) == 1}
    fields = {**GREEDY, "extra_body": {"ignore_eos": True, "allowed_token_ids": list(ids.values())}}
    drawn = client.completions.create(prompt=prompt, logprobs=5, **fields)
    tokens, _, _ = lists_of(drawn)
    again = client.completions.create(prompt=prompt, logprobs=5, **fields)
    assert cached_of(again) > 0 and lists_of(again) == lists_of(drawn)

    outputs = [ids[token] for token in tokens]
    scored = client.completions.create(prompt=prompt + outputs, echo=True, logprobs=5, **{**GREEDY, "max_tokens": 0})
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    assert cached_of(scored) == 0
    assert lists_of(scored)[1][0] is None
    assert [part[len(prompt) :] for part in lists_of(scored)] == list(lists_of(drawn))


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    """The chunks' tokens are those of the plain response, and their bytes are its text."""
    fields: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": text_prompt("chat logprobs", 9)}]}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, **fields)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    chunks = list(client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **fields))
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [token for logprobs in streamed for token in logprobs.content or ()] == content
    assert content is not None and len(content) == 12
    text = b"".join(bytes(token.bytes or ()) for token in content).decode("utf-8", "replace")
    assert text == whole.choices[0].message.content


def test_prompt_logprobs_with_preemption(tight: Server) -> None:
    """Preempted or not, each request gets the logprobs of its whole prompt, the same every time."""
    prompts = [text_prompt(f"tight logprobs {index}", 90) for index in range(6)]
    with tight.client() as client:

        def ask(*prompts: str) -> list[Any]:
            fields = {**GREEDY, "max_tokens": 60, "extra_body": {"ignore_eos": True, "prompt_logprobs": 2}}
            answer = client.completions.create(prompt=list(prompts), logprobs=2, **fields)
            assert cached_of(answer) == 0
            return [{**choice.model_dump(), "index": 0} for choice in answer.choices]

        before = tight.metrics()["num_preemptions_total"]
        crowded = ask(*prompts)
        assert tight.metrics()["num_preemptions_total"] > before, "the pool should be too small"
        assert [choice for prompt in prompts for choice in ask(prompt)] == crowded
    for prompt, choice in zip(prompts, crowded, strict=True):
        assert len(choice["prompt_logprobs"]) == len(vocabulary.encode(prompt))
        assert len(choice["logprobs"]["tokens"]) == 60
