"""Usage as the official client receives it, on a real model: every number, in every kind of request."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import openai

from quipu.actors.messages.prompts import ChatPrompt
from tests.chats import encode_chat
from tests.e2e.prompts import count, piece_of, text_prompt, token_prompt, vocabulary
from tests.e2e.servers import BLOCK, cached_of, full_blocks, usage_of


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    arguments = {"model": "demo", "max_tokens": 6, "temperature": 0, **fields}
    return client.completions.create(prompt=prompt, **arguments)


def test_same_prompt_twice(client: openai.OpenAI) -> None:
    """The first time nothing is cached and every full block is written; then all blocks but the last token's hit."""
    prompt = text_prompt("twice", 90)
    first, second = complete(client, prompt), complete(client, prompt)
    length = count(prompt)
    cached = full_blocks(length - 1)
    assert usage_of(first)["prompt_tokens"] == usage_of(second)["prompt_tokens"] == length
    assert usage_of(first)["total_tokens"] == length + usage_of(first)["completion_tokens"]
    assert (cached_of(first), cached_of(second)) == (0, cached)
    assert usage_of(first)["prompt_tokens_details"]["cache_write_tokens"] == full_blocks(length)
    assert first.choices == second.choices


def test_block_boundaries(client: openai.OpenAI) -> None:
    """At least one prompt token is always computed: a prompt of whole blocks hits one block fewer."""
    for length, cached in ((1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK, 2 * BLOCK), (3 * BLOCK + 1, 3 * BLOCK)):
        prompt = token_prompt(f"boundary {length}", length)
        assert [cached_of(complete(client, prompt, max_tokens=1)) for _ in range(2)] == [0, cached]


def test_shared_prefix(client: openai.OpenAI) -> None:
    """A prompt hits the full blocks that it shares with an earlier one, up to the first difference."""
    short, long = token_prompt("longer", 70), token_prompt("longer", 130)
    complete(client, short, max_tokens=1)
    assert cached_of(complete(client, long, max_tokens=1)) == full_blocks(70)
    branched = [*long[:100], *token_prompt("branch", 60)]
    assert cached_of(complete(client, branched, max_tokens=1)) == full_blocks(100)


def round_trip_turn(client: openai.OpenAI, messages: list[dict[str, str]]) -> tuple[str, int, dict[str, Any]]:
    """Send one chat turn; return an answer that encodes to exactly the generated tokens, its length, and the usage.

    A stream carries one token per chunk, so the tokens are visible. An untrained model often generates tokens that the
    tokenizer would not produce for the same text, so many choices are requested until one round-trips.
    """
    num_tokens = 20
    for seed in range(10):
        pieces: dict[int, list[str]] = defaultdict(list)
        for chunk in client.chat.completions.create(
            model="demo",
            messages=messages,
            n=8,
            max_tokens=num_tokens,
            temperature=0.7,
            seed=100 * seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            for choice in chunk.choices:
                pieces[choice.index].append(choice.delta.content or "")
        if seed == 0:
            usage = usage_of(chunk)
        prompt_ids = encode_chat(vocabulary, ChatPrompt(tuple(messages))).token_ids
        for drawn in pieces.values():
            turn = [*messages, {"role": "assistant", "content": "".join(drawn)}]
            ids = encode_chat(vocabulary, ChatPrompt(tuple(turn), add_generation_prompt=False)).token_ids
            answer_ids = ids[len(prompt_ids) :][:num_tokens]
            if [piece for piece in drawn if piece] == [piece_of(i) for i in answer_ids]:
                return "".join(drawn), num_tokens, usage
    raise AssertionError("no choice encodes to its generated tokens")


def test_growing_chat(client: openai.OpenAI) -> None:
    """Over five turns each prompt hits the full blocks of the previous turn, its output included.

    The KV of an output's last token is never computed, so a block that it completes is not cached.
    """
    messages = [{"role": "user", "content": text_prompt("chat", 40)}]
    known = 0
    seen = []
    for turn in range(5):
        answer, num_drawn, usage = round_trip_turn(client, messages)
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert seen[-1] == full_blocks(known), f"turn {turn}"
        known = usage["prompt_tokens"] + num_drawn - 1
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": text_prompt(f"question {turn}", 12)},
        ]
    assert seen[0] == 0 and all(before < after for before, after in pairwise(seen))


def test_list_of_prompts(client: openai.OpenAI) -> None:
    """A request with several prompts reports the sums over them."""
    prompts = [token_prompt(f"list {length}", length) for length in (BLOCK + 4, 2 * BLOCK + 1, 4 * BLOCK)]
    complete(client, prompts[1])
    answer = complete(client, prompts, max_tokens=4, extra_body={"ignore_eos": True})
    usage = usage_of(answer)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 12)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    details = {"cached_tokens": 2 * BLOCK, "cache_write_tokens": BLOCK + 4 * BLOCK, "audio_tokens": 0}
    assert usage["prompt_tokens_details"] == details
    again = complete(client, prompts, max_tokens=4, extra_body={"ignore_eos": True})
    assert cached_of(again) == BLOCK + 2 * BLOCK + 3 * BLOCK
    assert again.choices == answer.choices


def test_three_choices(client: openai.OpenAI) -> None:
    """With n=3 the prompt counts once, cached tokens are the first choice's, completion tokens add up."""
    prompt = token_prompt("three", 50)
    fields = {"n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    cold, warm = complete(client, prompt, **fields), complete(client, prompt, **fields)
    for answer, cached in ((cold, 0), (warm, full_blocks(50))):
        assert usage_of(answer)["prompt_tokens"] == 50
        assert usage_of(answer)["completion_tokens"] == 30
        assert cached_of(answer) == cached
    assert len({choice.text for choice in cold.choices}) == 3
    assert cold.choices == warm.choices


def test_streamed_usage(client: openai.OpenAI) -> None:
    """A warm prompt gets the same text and usage plain and streamed; usage is only in the requested chunk."""
    prompt = text_prompt("streamed", 60)
    complete(client, prompt)
    plain = complete(client, prompt, max_tokens=12)
    without = list(complete(client, prompt, max_tokens=12, stream=True))
    with_usage = list(complete(client, prompt, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in [*without, *with_usage[:-1]])
    assert with_usage[-1].choices == [] and usage_of(with_usage[-1]) == usage_of(plain)
    for chunks in (without, with_usage):
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_continuous_usage(client: openai.OpenAI) -> None:
    """With continuous_usage_stats every chunk has the usage so far: constant for the prompt, rising for completions."""
    prompt = token_prompt("continuous", 40)
    complete(client, prompt)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        complete(client, prompt, max_tokens=8, stream=True, stream_options=options, extra_body={"ignore_eos": True})
    )
    usages = [usage_of(chunk) for chunk in chunks]
    assert all((u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]) == (40, 32) for u in usages)
    counts = [u["completion_tokens"] for u in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 8
    assert all(u["total_tokens"] == 40 + u["completion_tokens"] for u in usages)


def test_cached_tokens_by_tier(client: openai.OpenAI) -> None:
    """return_cached_tokens_details splits cached tokens by tier; the parts add up."""
    prompt = token_prompt("tiers", 40)
    complete(client, prompt)
    assert "cached_tokens_by_tier" not in usage_of(complete(client, prompt))["prompt_tokens_details"]
    details = usage_of(complete(client, prompt, extra_body={"return_cached_tokens_details": True}))
    tiers = details["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert tiers == {"device": 32, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
