"""With speculative decoding: the same tokens, texts, scores and usage, whatever is asked for and whatever happens to
the engine, and books that tell what was drafted.

On the CPU backend with the tiny checkpoint. Few tokens are allowed, so that every output repeats itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import pytest
import trio
from safetensors.torch import load_file, save_file

from quipu.actors.messages.handler import Delta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.output import OutputRules
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.request_desk.health import DrainMode
from tests.actors.reference_runtime import Server, reference_runtime
from tests.faults.deadly_engines import Deaths, Output, ask, open_deadly, settle
from tests.grammars import regex, schema
from tests.kept_forks import kept_forks
from tests.near import assert_same
from tests.prompts import prompt_of
from tests.runtimes import PAIR, Client, value_of
from tests.tiny import TINY
from tests.traps.wire import CHAT
from tests.vocabularies import Vocabulary

CHEAP = {"speculative_costs": ((1, 1.0), (2, 1.01)), "draft_model_costs": ((1, 0.01), (2, 0.011))}
"""Costs by which drafts are worth verifying: those that are measured depend on what else this machine does."""
SAME_MODEL, SHALLOW = "the model itself", "half of its layers"
A, B, C = ALLOWED = (60, 61, 62)
"""The tokens of "Z", "[" and "\\"."""
MAX_TOKENS, BUDGET = 48, 20
VOCABULARY = Vocabulary(TINY)
OPENING, CLOSING = (VOCABULARY.encoder.encode_within_text(tag) for tag in ("<think>", "</think>"))


def few(**rules: Any) -> dict[str, Any]:
    return {"rules": LogitRules(allowed_token_ids=ALLOWED, **rules)}


STOP, BUDGETED = "stop string", "thinking budget"
CASES: dict[str, dict[str, Any]] = {
    "greedy": few() | {"temperature": 0.0},
    "seeded": few(),
    "several choices": few() | {"n": 3, "temperature": 0.5},
    "penalties": few(frequency_penalty=0.05, presence_penalty=0.2, repetition_penalty=1.05),
    "bias": {"rules": LogitRules(bias={A: 60.0, B: 60.0, C: 59.0})},
    "bad words": few() | {"bad_words": ("Z[", "\\\\")},
    "min_tokens": few(min_tokens=25) | {"stop_token_ids": (A,)},
    "prompt scores": few() | {"prompt_logprobs": 2},
    BUDGETED: few() | {"thinking_budget": BUDGET, "output": OutputRules()},
    "prediction": few() | {"prediction": "Z[\\" * 20},
    "grammar": {"grammar": regex("(ab|cd){4}(one,? )+")},
    "greedy grammar": {"grammar": regex("(ab|cd){4}(one,? )+"), "temperature": 0.0},
    STOP: few(),
}
"""What is asked for, each with its own prompt; the stop string depends on the text."""


async def ask_case(client: Client, name: str, fields: dict[str, Any], **more: Any) -> Output:
    prompt = prompt_of(12, seed=10 + list(CASES).index(name)) * 5
    if name == BUDGETED:
        prompt += OPENING
    return await ask(client, prompt, **{"max_tokens": MAX_TOKENS, "logprobs": 3, **fields, **more})


def opened(deaths: Deaths | None = None, **changes: Any) -> AbstractAsyncContextManager[Client]:
    return open_deadly(deaths or Deaths(), **{"executor": "cpu", "num_blocks": 256, **CHEAP, **changes})


@attrs.frozen
class Plain:
    """The answers without drafts, by case."""

    fields: dict[str, dict[str, Any]]
    cold: dict[str, Output]
    warm: dict[str, Output]


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Load the tokenizer for grammars once."""
    with kept_forks():
        yield


@pytest.fixture(scope="module")
def plain(forks: None) -> Plain:
    async def answer() -> Plain:
        async with opened() as client:
            whole = await ask_case(client, STOP, CASES[STOP], domain="another")
            fields = CASES | {STOP: CASES[STOP] | {"stop": (whole.texts[0][27:33],)}}
            cold, warm = [{name: await ask_case(client, name, fields[name]) for name in fields} for _ in range(2)]
            await settle(client)
        return Plain(fields, cold, warm)

    return trio.run(answer)


def test_cases_are_what_they_say(plain: Plain) -> None:
    """Each case would show a difference: what it asks for has an effect on the text, in the middle of it."""
    cold, ids = plain.cold, {name: answer.token_ids[0] for name, answer in plain.cold.items()}
    assert cold[STOP].reasons == (FinishReason.STOP,) and len(cold[STOP].texts[0]) > 10
    assert ids[BUDGETED][BUDGET : BUDGET + len(CLOSING)] == CLOSING
    assert cold[BUDGETED].record.reasoning_tokens == BUDGET + len(CLOSING)
    assert 25 < len(ids["min_tokens"]) < MAX_TOKENS and ids["min_tokens"].index(A) == len(ids["min_tokens"]) - 1
    assert cold["bad words"].texts[0] != "" and "Z[" not in cold["bad words"].texts[0]
    assert len(set(cold["several choices"].texts)) > 1 and cold["prompt scores"].prompt_scores
    assert all(answer.record.draft_tokens == 0 for answer in cold.values())


def check(answers: dict[str, Output], expected: dict[str, Output], *, cached: bool = True) -> None:
    """Assert that answers are those without drafts, and that drafts of each were accepted.

    `cached`: whether as many tokens were cached, too.
    """
    for name, answer in answers.items():
        other, record = expected[name], answer.record
        usage = answer.usage if cached else (answer.usage[0], other.usage[1], answer.usage[2])
        assert_same(attrs.evolve(answer, usage=usage), other)
        assert record.reasoning_tokens == other.record.reasoning_tokens and not record.disputed
        assert record.draft_tokens >= record.accepted_draft_tokens > 0, f"{name}: none was accepted"


def check_books(client: Client, *answered: dict[str, Output]) -> None:
    """Assert that some drafts were wrong, and that the counters say what the records do."""
    records, metrics = [answer.record for answers in answered for answer in answers.values()], client.runtime.metrics
    num_drafted, num_accepted = value_of(metrics.draft_tokens), value_of(metrics.accepted_tokens)
    assert num_drafted == sum(record.draft_tokens for record in records) > num_accepted
    assert num_accepted == sum(record.accepted_draft_tokens for record in records)
    assert value_of(metrics.usage_disputed) == 0


async def ask_all(client: Client, fields: dict[str, dict[str, Any]], **more: Any) -> dict[str, Output]:
    """Ask for all cases at once."""
    answers: dict[str, Output] = {}

    async def one(name: str) -> None:
        answers[name] = await ask_case(client, name, fields[name], **more)

    async with trio.open_nursery() as nursery:
        for name in fields:
            nursery.start_soon(one, name)
    return answers


@pytest.fixture(scope="module")
def draft_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Make draft models, by name."""
    folder = tmp_path_factory.mktemp("shallow")
    for path in TINY.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((TINY / "config.json").read_text())
    num_layers = config["num_hidden_layers"] // 2
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    tensors = load_file(TINY / "model.safetensors")
    beyond = tuple(f"model.layers.{index}." for index in range(num_layers, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(beyond)}
    save_file(kept, folder / "model.safetensors")
    return {"none": None, SAME_MODEL: str(TINY), SHALLOW: str(folder)}


@pytest.mark.parametrize(
    ("speculative", "draft_model"),
    [("ngram", "none"), ("suffix", "none"), ("ngram", SAME_MODEL), ("suffix", SHALLOW)],
)
async def test_one_after_the_other(
    plain: Plain, draft_models: dict[str, str | None], speculative: str, draft_model: str
) -> None:
    """Drafts change no answer and none of its numbers, whatever is asked for, cold and warm."""
    async with opened(speculative=speculative, draft_model=draft_models[draft_model]) as client:
        cold, warm = [{name: await ask_case(client, name, plain.fields[name]) for name in CASES} for _ in range(2)]
        await settle(client)
        check_books(client, cold, warm)
    check(cold, plain.cold)
    check(warm, plain.warm)


@pytest.mark.parametrize("draft_model", ["none", SHALLOW])
async def test_preempted(plain: Plain, draft_models: dict[str, str | None], draft_model: str) -> None:
    """Beside others, with too few blocks for all: sequences with drafts are preempted, and continue as before."""
    small = {"num_blocks": 24, "max_model_len": 192, "watermark": 0.0}
    async with opened(speculative="ngram", draft_model=draft_models[draft_model], **small) as client:
        answers = await ask_all(client, plain.fields)
        await settle(client)
        assert value_of(client.runtime.metrics.num_preemptions) > 0, "the pool must be too small for all"
        check_books(client, answers)
    check(answers, plain.cold)


async def test_resumed(plain: Plain) -> None:
    """Every engine dies in its tenth step, in which drafts are verified; the next one continues."""
    deaths = Deaths([10] * 200, after_step=True)
    async with opened(deaths, speculative="ngram") as client:
        answers = {name: await ask_case(client, name, plain.fields[name]) for name in CASES}
        await settle(client)
        check_books(client, answers)
    check(answers, plain.cold)
    # an engine may also die in a step that was sent ahead, of a request that has ended meanwhile
    assert len(CASES) < sum(answer.record.num_engine_deaths for answer in answers.values()) <= deaths.num_deaths


async def test_computed_apart(plain: Plain) -> None:
    """One engine computes prompts, and another, to which their blocks move, drafts, with a draft model that computes
    what is in them."""
    apart = {"num_engines": 2, "engine_roles": PAIR, "has_peers": True, "prefill_local_tokens": 0}
    async with opened(speculative="ngram", draft_model=str(TINY), **apart) as client:
        answers = await ask_all(client, plain.fields)
        await settle(client)
        check_books(client, answers)
    check(answers, plain.cold)
    assert all(answer.record.decode_engine == 1 for answer in answers.values())
    assert sum(answer.record.moved_tokens for answer in answers.values()) > 0


async def test_handed_over(plain: Plain) -> None:
    """An engine hands over what it has begun, and the other continues it."""
    async with opened(speculative="ngram", num_engines=2, routing="round-robin") as client:
        num_tokens = 0

        def hand_over(delta: Delta) -> None:
            nonlocal num_tokens
            num_tokens += len(delta.token_ids or ())
            if num_tokens > 100 and not drained:
                drained.append(0)
                client.runtime.desk.control.drain(0, DrainMode.HAND_OVER)

        drained: list[int] = []
        answers = await ask_all(client, plain.fields, on_delta=hand_over)
        await settle(client)
        check_books(client, answers)
    check(answers, plain.cold)
    assert sum(answer.record.decode_engine is not None for answer in answers.values()) > 2


async def test_model_drafts_of_itself() -> None:
    """A draft model that is the model guesses every token of text that repeats nothing, greedy and seeded, in a step
    for each 16, also behind a cached prefix; usage is what it is without."""
    prompts = [prompt_of(70, seed=1), prompt_of(70, seed=1)[:64] + prompt_of(9, seed=2), prompt_of(9, seed=3)]
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]

    async def answers(client: Client) -> list[Output]:
        return [await ask(client, prompt, max_tokens=100, **way) for way in ways for prompt in prompts]

    async with opened() as client:
        expected = await answers(client)
    async with opened(speculative="ngram", draft_model=str(TINY)) as client:
        found = await answers(client)
        await settle(client)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    for answer, other in zip(found, expected, strict=True):
        assert_same(answer, other)
        record = answer.record
        assert record.draft_tokens == record.accepted_draft_tokens > 0.85 * record.completion_tokens


FORM = {
    "type": "object",
    "properties": {name: {"enum": ["first", "second"]} for name in ("one thing", "another thing", "the last of them")},
    "required": ["one thing", "another thing", "the last of them"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forced_tokens_are_drafted(temperature: float) -> None:
    """What a grammar leaves no choice about is verified several tokens at a time, and guesses behind it: the same text,
    scores and usage in fewer steps, though little of it repeats."""
    fields = {"grammar": schema(FORM), "temperature": temperature, "seed": 7, "max_tokens": 26, "logprobs": 3}
    async with opened() as client:
        expected = await ask(client, prompt_of(9, seed=3), **fields)
    async with opened(speculative="ngram") as client:
        answer = await ask(client, prompt_of(9, seed=3), **fields)
        await settle(client)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert_same(answer, expected)
    assert answer.texts[0].startswith('{"one thing":"')
    record = answer.record
    assert record.accepted_draft_tokens > 0.5 * record.completion_tokens
    assert record.accepted_draft_tokens > 0.6 * record.draft_tokens


async def test_prediction() -> None:
    """A chat with a `prediction` has the same answer, and its usage says how much of the prediction was right."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 40}
    chat |= {"temperature": 1.0, "seed": 3}

    async def ask(server: Server, **fields: Any) -> dict[str, Any]:
        exchange, answer = await server.http.post(CHAT, {**chat, **fields})
        assert exchange.status == 200, answer
        return dict(answer)

    def told(answer: dict[str, Any]) -> tuple[int, int]:
        details = answer["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    async with reference_runtime({}, speculative="ngram", **CHEAP) as server:
        plain = await ask(server)
        assert told(plain) == (0, 0)
        text = plain["choices"][0]["message"]["content"]
        right = {"type": "content", "content": [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]}
        for prediction, is_right in ((right, True), ({"type": "content", "content": "x y z " * 30}, False)):
            answer = await ask(server, prediction=prediction)
            assert answer["choices"] == plain["choices"]
            accepted, _ = told(answer)
            assert (accepted > 5) == is_right
        stopped = await ask(server, prediction=right, stop=text[10:12])
        assert text.startswith(stopped["choices"][0]["message"]["content"])
        assert told(stopped)[0] < stopped["usage"]["completion_tokens"] < 20, "what follows a stop string is not given"
        streamed = await ask_stream(server, {**chat, "prediction": right})
        assert streamed["completion_tokens_details"]["accepted_prediction_tokens"] > 5


async def ask_stream(server: Server, chat: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a streamed chat."""
    body = {**chat, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    _, events = await server.http.stream(CHAT, body)
    return dict(events[-2]["usage"])
