"""Calls and reasoning in chat completions: whole and streamed, put together by OpenAI's client."""

from __future__ import annotations

import random
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, ScoredDelta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, Markup, OutputRules
from quipu.actors.messages.scores import ScoredToken
from quipu.web.api.generation import ReplyRules, WantedScores
from quipu.web.api.openai.routes import read_chat, read_completion
from tests.web.fakes import STARTED, record
from tests.web.outputs import SOME_CALL, deltas, draw_deltas, draw_output, parts_of, scored, script
from tests.web.replies import reply_to, streamed, whole

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
CONTINUOUS = {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LEGACY = ReplyRules(legacy_functions=True)


async def whole_choice(events: list[OutletEvent], **changes: Any) -> dict[str, Any]:
    answer = whole(await reply_to(read_chat, BODY, output=OutputRules(), **changes), events)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def streamed_deltas(events: list[OutletEvent], **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the deltas of a stream with one choice, and its finish reason."""
    chunks = streamed(await reply_to(read_chat, STREAM, output=OutputRules(), **changes), events)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["finish_reason"] is None for choice in choices[:-1]) and choices[-1]["delta"] == {}
    return [choice["delta"] for choice in choices[:-1]], choices[-1]["finish_reason"]


async def test_whole_message() -> None:
    """A message has its text, its reasoning under both names, its calls, and the finish reason `tool_calls`."""
    choice = await whole_choice(script(*SOME_CALL))
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {
        "role": "assistant", "content": "I look.", "refusal": None,
        "reasoning_content": "Let me look.", "reasoning": "Let me look.",
    }  # fmt: skip
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Cusco"}'}}
    assert choice["finish_reason"] == "tool_calls"


async def test_stream_of_events() -> None:
    """One chunk for each event: the call's id and name come first and once, its arguments follow as they were written.

    A message that begins with reasoning has no content yet.
    """
    told, reason = await streamed_deltas(script(*SOME_CALL))
    (call,) = told[4].pop("tool_calls")
    assert told == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Let me ", "reasoning": "Let me "},
        {"reasoning_content": "look.", "reasoning": "look."},
        {"content": "I look."},
        {},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Cusco"}'}}]},
    ]
    assert reason == "tool_calls"
    assert call.pop("id") == (await whole_choice(script(*SOME_CALL)))["message"]["tool_calls"][0]["id"]
    assert call == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}


@pytest.mark.parametrize("changes", [{}, {"with_token_ids": True}])
async def test_deltas_of_models_that_reason(changes: dict[str, Any]) -> None:
    """Each delta of such a model has both names of reasoning, null where there is none; nothing else is changed."""
    told: list[dict[str, Any]] = []
    bare: list[dict[str, Any]] = []
    for deltas_of, rules in ((told, ReplyRules(names_reasoning=True)), (bare, ReplyRules())):
        reply = await reply_to(read_chat, STREAM, output=OutputRules(), rules=rules, **changes)
        choices = [chunk["choices"][0] for chunk in streamed(reply, script(*SOME_CALL))]
        deltas_of += [choice["delta"] for choice in choices]
    for delta, without in zip(told, bare, strict=True):
        # Calls have ids of their own in each response.
        calls = {"tool_calls": delta["tool_calls"]} if "tool_calls" in without else {}
        assert delta == {"reasoning_content": None, "reasoning": None, **without, **calls}


@pytest.mark.parametrize(
    ("events", "reason", "expected"),
    [
        (SOME_CALL, FinishReason.STOP, "tool_calls"),
        (SOME_CALL, FinishReason.LENGTH, "length"),
        (SOME_CALL[:-2], FinishReason.LENGTH, "length"),
        (SOME_CALL[:-2], FinishReason.STOP, "stop"),
        (SOME_CALL[:4], FinishReason.STOP, "stop"),
    ],
)
async def test_finish_reasons(events: Any, reason: FinishReason, expected: str) -> None:
    """Only a choice that stopped after a complete call asks for it to be carried out; a cut is never hidden."""
    assert (await whole_choice(script(*events, reason=reason)))["finish_reason"] == expected
    assert (await streamed_deltas(script(*events, reason=reason)))[1] == expected


async def test_cut_call_is_shown_as_it_is() -> None:
    """The arguments of a call that was cut are neither completed nor dropped."""
    choice = await whole_choice(script(*SOME_CALL[:-2], reason=FinishReason.LENGTH))
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":'


async def test_content_is_null_without_text() -> None:
    """A message of calls or reasoning alone has no content, and no field for what it does not have."""
    message = (await whole_choice(script(*SOME_CALL[5:])))["message"]
    assert message["content"] is None and "reasoning" not in message
    message = (await whole_choice(script(*SOME_CALL[:2])))["message"]
    assert message["content"] is None and "tool_calls" not in message


async def test_any_output_streamed_and_whole() -> None:
    """OpenAI's client makes of any stream the messages that are sent as a whole, with the same ids and reasons,
    whichever of them the model begins first."""
    for seed in range(120):
        rng = random.Random(seed)
        drawn = [draw_output(rng), draw_output(rng)]
        waiting = [draw_deltas(rng, output, index) for index, output in enumerate(drawn)]
        for index, told in enumerate(waiting):
            told.append(Delta(index, "", 1, rng.choice((FinishReason.STOP, FinishReason.LENGTH))))
        with_ids = rng.random() < 0.3
        if with_ids:  # come first, of whichever choice
            waiting = [[_with_prompt_ids(index), *told] for index, told in enumerate(waiting)]
        events: list[OutletEvent] = [STARTED]
        while left := [told for told in waiting if told]:
            events.append(rng.choice(left).pop(0))
        events.append(Closed(record(), None))
        changes = {"include_reasoning": rng.random() < 0.7, "num_choices": 2, "with_token_ids": with_ids}
        answer = whole(await reply_to(read_chat, {**BODY, "n": 2}, **changes), events)
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        chunks = streamed(await reply_to(read_chat, {**STREAM, "n": 2}, **changes), events)
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
        assert roles == [0, 1] and ("prompt_token_ids" in chunks[0]) == with_ids
        snapshot = state.current_completion_snapshot.model_dump(exclude_unset=True)
        for output, choice, put_together in zip(drawn, answer["choices"], snapshot["choices"], strict=True):
            assert plain(put_together) == plain(choice), seed
            parts = parts_of(output, with_reasoning=bool(changes["include_reasoning"]))
            message = plain(choice)
            assert message["content"] == "".join(part.text for part in parts if part.kind == "text")
            assert message["reasoning"] == "".join(part.text for part in parts if part.kind == "reasoning")
            assert [call[1:] for call in message["calls"]] == [
                (part.name, part.text) for part in parts if part.kind == "call"
            ]
            assert len({call[0] for call in message["calls"]}) == len(message["calls"])


def _with_prompt_ids(index: int) -> OutletEvent:
    return ScoredDelta(index, "", 0, None, of_prompt=OfPrompt(token_ids=range(3)))


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Return what a client makes of a choice: no text is the same as an empty one."""
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        "reason": choice["finish_reason"],
    }


async def test_hidden_reasoning() -> None:
    """`include_reasoning: false` drops reasoning from the response, and no token from the usage so far."""
    assert "reasoning" not in (await whole_choice(script(*SOME_CALL), include_reasoning=False))["message"]
    chunks = streamed(await reply_to(read_chat, CONTINUOUS, include_reasoning=False), script(*SOME_CALL))
    assert "Let me" not in str(chunks)
    usages = [chunk["usage"] for chunk in chunks[:-1]]
    assert usages[-1]["completion_tokens"] == 1 + len(SOME_CALL)
    assert usages[-1]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_usage_has_the_reasoning_tokens_of_the_record() -> None:
    """A whole response and a stream's last chunk have the record's count; the running usage has the count so far."""
    events = [
        STARTED,
        *deltas(*SOME_CALL),
        Delta(0, "", 1, FinishReason.STOP),
        Closed(record(reasoning_tokens=7), None),
    ]
    answer = whole(await reply_to(read_chat, BODY), events)
    chunks = streamed(await reply_to(read_chat, CONTINUOUS), events)
    told = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in (*chunks, answer)]
    assert told[1:4] == [1, 2, 2] and told[-2:] == [7, 7]


async def test_legacy_functions() -> None:
    """A client that sent `functions` gets a `function_call`, and the reason that belongs to it."""
    choice = await whole_choice(script(*SOME_CALL), rules=LEGACY)
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Cusco"}'}
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "function_call"
    told, reason = await streamed_deltas(script(*SOME_CALL), rules=LEGACY)
    calls = [delta["function_call"] for delta in told if "function_call" in delta]
    assert calls == [
        {"name": "get_weather", "arguments": ""}, {"arguments": '{"city":'}, {"arguments": ' "Cusco"}'}
    ]  # fmt: skip
    assert reason == "function_call" and not any("tool_calls" in delta for delta in told)


async def test_short_ids() -> None:
    """Where the template accepts nothing else, ids have nine letters and digits."""
    answer = whole(await reply_to(read_chat, BODY, has_short_ids=True), script(*SOME_CALL))
    chunks = streamed(await reply_to(read_chat, STREAM, has_short_ids=True), script(*SOME_CALL))
    told = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    call_id = told[0]["id"]
    assert len(call_id) == 9 and call_id.isalnum()
    assert answer["choices"][0]["message"]["tool_calls"][0]["id"] == call_id


@pytest.mark.parametrize("include_reasoning", [True, False])
async def test_logprobs_and_token_ids(include_reasoning: bool) -> None:
    """Each token's logprobs and id are sent exactly once, also where it is shown as nothing or as several events."""
    both = (Markup("<tool_call>"), CallBegin(0, "f"), ArgumentsDelta(0, "{}"), CallEnd(0))
    played = [*deltas(*SOME_CALL[:4]), Delta(0, "plain", 1, None), Delta(0, "", 1, None, events=both)]
    played.append(Delta(0, "", 1, FinishReason.STOP))
    tokens = [ScoredToken(n, f"t{n}", b"t", 0, -1.0, 1, ()) for n in range(len(played))]
    events = [scored(one, token) for one, token in zip(played, tokens, strict=True)]
    events.insert(0, ScoredDelta(0, "", 0, None, of_prompt=OfPrompt(token_ids=range(5))))
    changes = {
        "scores": WantedScores(output=0), "with_token_ids": True, "include_reasoning": include_reasoning
    }  # fmt: skip
    end = Closed(record(), None)
    answer = whole(await reply_to(read_chat, BODY, **changes), [STARTED, *events, end])
    chunks = streamed(await reply_to(read_chat, STREAM, **changes), [STARTED, *events, end])
    texts, ids = [token.text for token in tokens], [token.token_id for token in tokens]
    choice = answer["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == texts and choice["token_ids"] == ids
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [one["token"] for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    assert told == texts
    assert [one for choice in choices for one in choice.get("token_ids", ())] == ids
    assert answer["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == [0, 1, 2, 3, 4]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


async def test_token_ids_of_completions() -> None:
    """Each choice of a completion has the ids of its own prompt and of its output."""
    events: list[OutletEvent] = [STARTED]
    for index in (0, 1):
        ids = range(20_000) if index else range(3)
        events.append(ScoredDelta(index, "", 0, None, of_prompt=OfPrompt(token_ids=ids)))
        events.append(Delta(index, "", 1, None, token_ids=(7,)))
        events.append(Delta(index, "a", 2, FinishReason.STOP, token_ids=(8, 9)))
    events.append(Closed(record(), None))
    body = {"prompt": ["x", "y"]}
    answer = whole(await reply_to(read_completion, body, with_token_ids=True), events)
    chunks = streamed(await reply_to(read_completion, {**body, "stream": True}, with_token_ids=True), events)
    assert "prompt_token_ids" not in answer
    for index in (0, 1):
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        choice = answer["choices"][index]
        assert choice["prompt_token_ids"] == told[0]["prompt_token_ids"] == list(range(20_000 if index else 3))
        assert choice["token_ids"] == [one for choice in told for one in choice.get("token_ids", ())] == [7, 8, 9]
        assert choice["text"] == "".join(choice["text"] for choice in told) == "a"


async def test_failure_within_a_call() -> None:
    """A stream that fails within a call ends with the error, after what was sent of the call."""
    broken = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    chunks = streamed(await reply_to(read_chat, STREAM), [STARTED, *deltas(*SOME_CALL[:-2]), broken])
    assert chunks[-1]["error"]["message"] == "engine died"
    assert chunks[-2]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"city":'
