"""Logprobs, prompt logprobs and echo through every actor, over HTTP, with the fake backend.

The fake computes logprobs from the KV that it reads through the block tables, so one from a stale or foreign block, a
void step or another token would be noticed. `prompt_scores` and `continuation_scores` return what is correct.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.detokenizer.text_store import DetokenizerMessage, TextStore
from quipu.actors.messages.accountant import Completed, Refused
from quipu.actors.messages.detokenizer import Tokens, Track
from quipu.actors.messages.handler import ScoredDelta
from quipu.actors.messages.scores import Scores, StepPayloads
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation, continuation_scores, prompt_scores
from tests.runtimes import BLOCK, Client, full_blocks, small_runtime, text_of
from tests.tiny import TINY
from tests.traps.wire import CHAT, COMPLETIONS, TIGHT, body, over_http, prompt_of, samples, settle
from tests.vocabularies import Vocabulary

PROMPT = prompt_of(50, seed=1)


async def post(client: Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    exchange, answer = await over_http(client).post(COMPLETIONS, body(prompt, **fields))
    assert exchange.status == 200, answer
    return dict(answer)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def by_id(scores: Scores) -> list[dict[str, Any]]:
    """Return scores in the shape of `prompt_logprobs`, without texts."""
    reported = []
    for at, token_id in enumerate(scores.token_ids):
        likeliest = enumerate(zip(scores.top_ids[at], scores.top_logprobs[at], strict=True), start=1)
        ranks = {top_id: (rank, logprob) for rank, (top_id, logprob) in likeliest}
        ranks.setdefault(token_id, (scores.ranks[at], scores.logprobs[at]))
        reported.append({str(i): {"rank": rank, "logprob": logprob} for i, (rank, logprob) in ranks.items()})
    return reported


def prompt_logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    first, *others = choice["prompt_logprobs"]
    assert first is None
    return [
        {token_id: {"rank": one["rank"], "logprob": one["logprob"]} for token_id, one in other.items()}
        for other in others
    ]


def assert_logprobs(choice: dict[str, Any], prompt: list[int], count: int = 8) -> None:
    """Check every logprob of a completion with `logprobs` and `prompt_logprobs`."""
    outputs = continuation_scores(prompt, count, 3)
    assert choice["logprobs"]["token_logprobs"] == outputs.logprobs
    assert choice["logprobs"]["tokens"] == list(map(one_by_one, outputs.token_ids))
    for at, reported in enumerate(choice["logprobs"]["top_logprobs"]):
        expected: dict[str, float] = {}
        for token_id, logprob in zip(outputs.top_ids[at], outputs.top_logprobs[at], strict=True):
            expected.setdefault(one_by_one(token_id), logprob)  # incomplete characters have the same text
        expected[one_by_one(outputs.token_ids[at])] = outputs.logprobs[at]
        assert reported == expected
    assert prompt_logprobs_of(choice) == by_id(prompt_scores(prompt, 2))


@cache
def one_by_one(token_id: int) -> str:
    decoder = vocabulary().decoder.make_decoder(skip_special_tokens=False, prompt_tail=())
    return decoder.push(token_id) + decoder.flush()


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TINY)


async def test_outputs_cold_warm_and_streamed(autojump_clock: trio.abc.Clock) -> None:
    """Logprobs are the same with a cold and a warm cache, in chat and in completions, whole and streamed."""
    expected = continuation_scores(PROMPT, 8, 3)
    async with small_runtime() as client:
        cold, warm = [await post(client, PROMPT, logprobs=3) for _ in range(2)]
        assert (cached(cold), cached(warm)) == (0, full_blocks(len(PROMPT))), "only prompt logprobs need every position"
        _, chunks = await over_http(client).stream(COMPLETIONS, body(PROMPT, logprobs=3, stream=True))
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
        fields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
        _, chat = await over_http(client).post(CHAT, {**fields, "logprobs": True, "top_logprobs": 4})
        await settle(client)
    for answer in (cold, warm):
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == expected.logprobs
        assert logprobs["tokens"] == list(map(one_by_one, expected.token_ids))
    assert [value for part in streamed for value in part["token_logprobs"]] == expected.logprobs
    assert [value for part in streamed for value in part["text_offset"]] == warm["choices"][0]["logprobs"][
        "text_offset"
    ]
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 and all(len(token["top_logprobs"]) == 4 for token in content)
    assert (
        "".join(bytes(b for token in content for b in token["bytes"]).decode(errors="replace"))
        == (chat["choices"][0]["message"]["content"])
    )


@pytest.mark.parametrize("budget", [256, 64, 17, 5])
async def test_prompts_computed_in_chunks(autojump_clock: trio.abc.Clock, budget: int) -> None:
    """Every prompt position is scored once, whatever the chunks and the cache; no block is read."""
    async with small_runtime(max_num_batched_tokens=budget) as client:
        for _ in range(2):
            answer = await post(client, PROMPT, logprobs=3, prompt_logprobs=2)
            assert_logprobs(answer["choices"][0], PROMPT)
            assert cached(answer) == 0
        await settle(client)


async def test_scored_prompt_reads_no_blocks_but_writes_them(autojump_clock: trio.abc.Clock) -> None:
    """Other requests find a scored prompt's blocks; blocks that were cached are not counted again; the miss has a
    reason of its own."""
    details = {"return_cached_tokens_details": True}
    async with small_runtime() as client:
        writer = await post(client, PROMPT, prompt_logprobs=0, **details)
        plain = await post(client, PROMPT)
        again = await post(client, [*PROMPT, *prompt_of(20, seed=2)], echo=True, **details)
        longer = await post(client, [*PROMPT, *prompt_of(20, seed=2)])
        await settle(client)
    numbers = [
        (reported["cached_tokens"], reported["cache_write_tokens"])
        for reported in (answer["usage"]["prompt_tokens_details"] for answer in (writer, plain, again, longer))
    ]
    full, longest = full_blocks(len(PROMPT)), full_blocks(len(PROMPT) + 20)
    assert numbers == [(0, full), (full, 0), (0, longest - full), (longest, 0)]
    for answer in (writer, again):
        (miss,) = answer["usage"]["prompt_tokens_details"]["cache_misses"]
        assert miss == {"reason": "needs_prompt_logprobs", "token": 0}


@pytest.mark.parametrize("budget", [256, 24])
async def test_preempted_requests_with_logprobs(autojump_clock: trio.abc.Clock, budget: int) -> None:
    """After a preemption, in other chunks, no logprob is missing or repeated, and no block is read."""
    prompts = [prompt_of(38 + 5 * index, seed=index) for index in range(4)]
    answers: dict[int, dict[str, Any]] = {}
    async with small_runtime(**TIGHT, max_num_batched_tokens=budget) as client:
        await post(client, prompts[1])

        async def one(index: int) -> None:
            await trio.sleep(index / 100)
            answers[index] = await post(client, prompts[index], max_tokens=70, logprobs=3, prompt_logprobs=2)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(one, index)
        await settle(client)
        counters = samples(client)
    assert counters["num_preemptions_total"] > 0, "the runtime must be too small for all requests"
    assert counters["usage_disputed_total"] == 0
    for index, answer in answers.items():
        assert_logprobs(answer["choices"][0], prompts[index], 70)
        assert cached(answer) == 0


async def test_several_prompts_and_choices(autojump_clock: trio.abc.Clock) -> None:
    """Each choice has its own logprobs and those of its prompt; usage counts each prompt once."""
    prompts = [PROMPT, prompt_of(33, seed=2), PROMPT]
    async with small_runtime() as client:
        answer = await post(client, prompts, n=2, logprobs=3, prompt_logprobs=2)
        await settle(client)
    assert len(answer["choices"]) == 6
    for index, choice in enumerate(answer["choices"]):
        assert_logprobs(choice, prompts[index // 2])
    assert answer["usage"]["prompt_tokens"] == 133 and cached(answer) == 0


async def test_echo(autojump_clock: trio.abc.Clock) -> None:
    """The response has the prompt and its continuation, with logprobs for all but the first token; a concurrent request
    is unaffected."""
    async with small_runtime() as client:
        plain: list[dict[str, Any]] = []

        async def ask_plainly() -> None:
            plain.append(await post(client, PROMPT))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_plainly)
            answer = await post(client, PROMPT, echo=True, logprobs=3)
        written = await post(client, "Words, and more wörds.", echo=True, logprobs=0, max_tokens=1)
        await settle(client)
    (choice,) = answer["choices"]
    both, outputs = prompt_scores(PROMPT, 3), continuation_scores(PROMPT, 8, 3)
    assert choice["text"] == text_of(PROMPT) + text_of(continuation(PROMPT, 8))
    assert choice["logprobs"]["token_logprobs"] == [None, *both.logprobs, *outputs.logprobs]
    assert choice["logprobs"]["tokens"] == [one_by_one(i) for i in (PROMPT[0], *both.token_ids, *outputs.token_ids)]
    assert choice["logprobs"]["text_offset"][50] == len(text_of(PROMPT))
    assert plain[0]["choices"][0]["text"] == text_of(continuation(PROMPT, 8))
    assert plain[0]["choices"][0]["logprobs"] is None
    reported, text = written["choices"][0]["logprobs"], written["choices"][0]["text"]
    assert text.startswith("Words, and more wörds.")
    for offset, token in zip(reported["text_offset"], reported["tokens"], strict=True):
        assert "�" in token or text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_only(autojump_clock: trio.abc.Clock, stream: bool) -> None:
    """With `max_tokens` 0 there is no completion token in the text, the usage or the metrics."""
    async with small_runtime() as client:
        fields = body(PROMPT, echo=True, logprobs=1, max_tokens=0)
        if stream:
            usage = {"stream_options": {"include_usage": True}}
            _, chunks = await over_http(client).stream(COMPLETIONS, {**fields, "stream": True, **usage})
            first, last = chunks[0]["choices"][0], chunks[1]["choices"][0]
            choice = {**first, "finish_reason": last["finish_reason"]}
            answer = {"choices": [choice], "usage": chunks[-2]["usage"]}
        else:
            answer = await post(client, PROMPT, echo=True, logprobs=1, max_tokens=0)
        await settle(client)
        counters = samples(client)
    (choice,) = answer["choices"]
    assert choice["text"] == text_of(PROMPT) and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, *prompt_scores(PROMPT, 1).logprobs]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 50
    assert counters["generation_tokens_total"] == 0 and counters["usage_disputed_total"] == 0


async def test_prompt_of_one_token(autojump_clock: trio.abc.Clock) -> None:
    """A prompt of one token has a null as its only logprob."""
    async with small_runtime() as client:
        answer = await post(client, [300], echo=True, logprobs=1, prompt_logprobs=1, max_tokens=1)
        await settle(client)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None and len(choice["logprobs"]["tokens"]) == 2


async def test_logprobs_up_to_a_stop(autojump_clock: trio.abc.Clock) -> None:
    """Exactly the counted completion tokens have logprobs, including the stop token and those of a stop string."""
    stop = text_of(continuation(PROMPT, 4))[-2:]
    async with small_runtime(Dials(step_seconds=0.01, eos_after=5), eos_token_ids=(0,)) as client:
        ended = await post(client, PROMPT, logprobs=0, max_tokens=20)
        stopped = await post(client, PROMPT, logprobs=0, max_tokens=20, stop=stop)
        await settle(client)
    assert ended["usage"]["completion_tokens"] == len(ended["choices"][0]["logprobs"]["tokens"]) == 6
    reported = stopped["choices"][0]["logprobs"]["tokens"]
    assert stopped["usage"]["completion_tokens"] == len(reported) <= 5
    assert stop not in stopped["choices"][0]["text"] and stop in "".join(reported)


async def test_prompt_that_fills_the_context(autojump_clock: trio.abc.Clock) -> None:
    """The request is a 400 even with `max_tokens` 0, since one token is always sampled."""
    async with small_runtime(max_model_len=2 * BLOCK) as client:
        exchange, answer = await over_http(client).post(
            COMPLETIONS, body(prompt_of(2 * BLOCK), echo=True, max_tokens=0, logprobs=0)
        )
        fits = await post(client, prompt_of(2 * BLOCK - 1), echo=True, max_tokens=0, logprobs=0)
        await settle(client)
    assert exchange.status == 400 and answer["error"]["param"] == "prompt"
    assert len(fits["choices"][0]["logprobs"]["tokens"]) == 2 * BLOCK - 1


async def test_two_steps_in_one_report(autojump_clock: trio.abc.Clock) -> None:
    """Tokens of several steps in one message keep their own scores; those of unknown sequences are dropped."""
    deltas: list[ScoredDelta] = []

    class Outlet:
        def put(self, event: object, /) -> None:
            assert isinstance(event, ScoredDelta)
            deltas.append(event)

    def step(sequence_ids: list[int], token_ids: list[int]) -> StepPayloads:
        count = len(token_ids)
        scores = Scores(token_ids, [-float(i) for i in token_ids], [1] * count, [[]] * count, [[]] * count)
        return StepPayloads(sequence_ids, scores, [], [], [])

    inbox: Channel[DetokenizerMessage] = Channel(1)
    detokenizer = Detokenizer(
        TextStore(), vocabulary().decoder, Channel[Completed | Refused](1), lambda sequence_id: None
    )
    for sequence_id in (1, 3):
        inbox.post(Track("r", sequence_id, sequence_id, (), (), False, True, Outlet(), is_scored=True))
    inbox.post(
        Tokens(
            [1, 2, 3, 1, 3],
            [300, 301, 302, 303, 304],
            [],
            [],
            [step([1, 2, 3], [300, 301, 302]), step([1, 3], [303, 304])],
        )
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(detokenizer.run, inbox)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    reported = [(delta.index, delta.text, *((one.text, one.logprob) for one in delta.scores)) for delta in deltas]
    assert reported == [
        (index, one_by_one(token_id), (one_by_one(token_id), -float(token_id)))
        for index, token_id in ((1, 300), (3, 302), (1, 303), (3, 304))
    ]
