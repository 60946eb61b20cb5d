"""Inputs that end with a `compaction_trigger`, as Codex CLI sends them: the response is one sealed summary."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import ReasoningDelta, TextDelta
from quipu.web.api.openai.compaction import INSTRUCTION, LEAST_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS
from quipu.web.api.openai.responses_input import SUMMARY
from quipu.web.app import make_app
from tests.web.api.openai.test_compaction import HISTORY, PATH, TOOL, USAGE, contents, desk_of, messages, refusal
from tests.web.api.openai.test_openai_client import client_of
from tests.web.api.openai.test_responses_answer import EVENT, OUR_OWN, read_events
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, record, scripted
from tests.web.stored import storing

TRIGGER = {"type": "compaction_trigger"}
CODEX: dict[str, Any] = {
    "model": "tiny", "instructions": "be brief", "input": [*HISTORY, TRIGGER], "tools": [TOOL], "tool_choice": "auto",
    "parallel_tool_calls": True, "reasoning": {"effort": "high"}, "store": False, "stream": True,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "text": {"verbosity": "medium"},
}  # fmt: skip


async def stream_of(desk: FakeDesk, **fields: Any) -> list[dict[str, Any]]:
    async with Client(make_app(desk)).open("POST", PATH, {**CODEX, **fields}) as exchange:
        assert await exchange.wait_started() == 200
        return read_events(await exchange.read())


async def test_stream() -> None:
    """The stream has one item, which is the same in each event and in the response; the client knows every event."""
    desk = desk_of()
    desk.script = scripted(
        STARTED,
        Delta(0, "", 1, None, events=(ReasoningDelta("hm"), TextDelta("Hel"))),
        Delta(0, "lo", 1, FinishReason.LENGTH),
        Closed(record(), None),
    )
    events = await stream_of(desk)
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(5))
    for event in events:
        EVENT.validate_python(event)
    response = events[-1]["response"]
    (item,) = response["output"]
    assert events[2]["item"] == events[3]["item"] == item and item["type"] == "compaction"
    assert (response["status"], response["usage"]) == ("completed", USAGE), "also if its limit cut the summary"
    assert set(Response.model_validate(response, strict=True).model_extra or ()) == OUR_OWN
    assert "Hel" not in str(events) and INSTRUCTION not in str(events)


async def test_model_is_asked_for_a_summary() -> None:
    """The model gets what it would get for a response to the rest of the input, and is asked for a summary."""
    desk = desk_of()
    app = make_app(desk)
    await Client(app).post(PATH, {**CODEX, "input": HISTORY, "stream": False})
    before = desk.tickets[-1].encode.prompts[0]
    exchange, answer = await Client(app).post(PATH, {**CODEX, "stream": False})
    assert exchange.headers["x-quipu-ignored-fields"] == "reasoning.effort"
    encode = desk.tickets[-1].encode
    assert messages(desk) == [*before.messages, {"role": "user", "content": INSTRUCTION}]
    assert encode.prompts[0].tools == before.tools and encode.sampling.temperature == 0
    assert (encode.max_tokens, encode.least_room) == (MAX_SUMMARY_TOKENS, LEAST_SUMMARY_TOKENS)
    assert answer["status"] == "completed" and [item["type"] for item in answer["output"]] == ["compaction"]
    await Client(app).post(
        PATH, {**CODEX, "stream": False, "max_output_tokens": 100, "text": {"format": {"type": "json_object"}}}
    )
    assert (desk.tickets[-1].encode.max_tokens, desk.tickets[-1].encode.grammar) == (100, None)
    desk.counted = lambda prompt, param: len(prompt.messages)
    _, counted = await Client(app).post(f"{PATH}/input_tokens", CODEX)
    assert counted["input_tokens"] == len(messages(desk))


async def test_continued() -> None:
    """The item goes on as one of `/v1/responses/compact` does; a trigger that is not at the end is skipped."""
    desk = desk_of()
    async with client_of(desk) as client:
        history: Any = [{"role": "user", "content": "one"}, TRIGGER]
        response = await client.responses.create(model="tiny", input=history)
        later: Any = [*history, *response.output, {"role": "user", "content": "two"}]
        raw = await client.responses.with_raw_response.create(model="tiny", input=later)
    assert contents(desk) == ["one", f"{SUMMARY}Hello", "two"]
    assert raw.headers["x-quipu-ignored-fields"] == "input[1]"


async def test_never_stored(tmp_path: Any) -> None:
    """Where responses are stored, this one is not, and says so; what it continues may be."""
    async with storing(tmp_path, desk_of()) as stored:
        client: Any = stored.client
        first = await client.responses.create(model="tiny", input="one")
        answer = await client.responses.create(model="tiny", input=[TRIGGER], previous_response_id=first.id, store=True)
        assert contents(stored.desk) == ["one", "Hello", INSTRUCTION]
        assert answer.store is False and [item.type for item in answer.output] == ["compaction"]
        status, _ = await stored.ask("GET", f"{PATH}/{answer.id}")
        assert status == 404
        conversation = await client.conversations.create(items=[])
        for field, value in (("background", True), ("conversation", conversation.id)):
            body = {"model": "tiny", "input": [*HISTORY, TRIGGER], field: value}
            status, told = await stored.ask("POST", PATH, body)
            assert (status, told["error"]["param"]) == (400, field)


@pytest.mark.parametrize("why", ["silent", "broken"])
async def test_no_summary(why: str) -> None:
    """Without a summary the response fails, streamed with the usage and without an item, and whole with a status."""
    desk = desk_of()
    broken = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    end = Closed(record(), None) if why == "silent" else broken
    desk.script = scripted(STARTED, Delta(0, " " if why == "silent" else "half", 1, FinishReason.STOP), end)
    events = await stream_of(desk)
    assert [event["type"] for event in events][2:] == ["error", "response.failed"]
    assert events[-1]["response"]["output"] == [] and events[-1]["response"]["usage"] == USAGE
    assert events[2]["error"]["code"] == ("no_summary" if why == "silent" else "internal_error")
    exchange, _ = await Client(make_app(desk)).post(PATH, {**CODEX, "stream": False})
    assert exchange.status == (400 if why == "silent" else 500)


async def test_refused_by_name() -> None:
    """An input with nothing before the trigger, and fields that are wrong, are a 400 that names them."""
    app = make_app(desk_of())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [TRIGGER]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"include": 5}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"store": 5}, "store"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"prompt_cache_options": 5}, "prompt_cache_options"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ]
    for fields, param in cases:
        assert (await refusal(app, {"input": [*HISTORY, TRIGGER], **fields}, PATH))["param"] == param
