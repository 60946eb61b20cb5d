"""Responses that are stored, continued, fetched and deleted, with the official client and raw requests."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from structlog.testing import capture_logs

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, Outcome, RequestError
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, ReasoningDelta, TextDelta
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.web.app import make_app
from tests.actors.response_store.stores import bytes_on_disk
from tests.runtimes import eventually, small_runtime
from tests.web.api.openai.test_responses_answer import read_events
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, record, scripted
from tests.web.stored import Stored, storing

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    async with storing(tmp_path) as stored:
        yield stored


def contents(stored: Stored) -> list[str]:
    """Return the contents of the messages of the last request."""
    (prompt,) = stored.desk.tickets[-1].encode.prompts
    return [message["content"] for message in prompt.messages]


@pytest.mark.parametrize("stream", [False, True])
async def test_retrieved_as_it_was_given(stored: Stored, stream: bool) -> None:
    """The response that is fetched is the one that was given, and is there when its client hears the end."""
    client = stored.client
    if stream:
        async for event in await client.responses.create(model="tiny", input="hi", stream=True):
            if event.type == "response.completed":
                given = event.response
                assert await client.responses.retrieve(given.id) == given
    else:
        given = await client.responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert given.output_text == "Hello" and given.model_extra == {
        "store": True, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    found = await client.responses.retrieve(given.id)
    assert found == given
    _, answer = await stored.ask("GET", f"{PATH}/{given.id}")
    Response.model_validate(answer, strict=True)


async def test_chain(stored: Stored) -> None:
    """A response continues another one with all that is before it; instructions are not carried over."""
    client = stored.client
    first = await client.responses.create(model="tiny", input="one", instructions="be brief")
    second = await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert contents(stored) == ["one", "Hello", "two"] and second.previous_response_id == first.id
    third = await client.responses.create(
        model="tiny",
        previous_response_id=second.id,
        instructions="be long",
        input=[{"role": "user", "content": "three"}],
    )
    assert contents(stored) == ["be long", "one", "Hello", "two", "Hello", "three"]
    await client.responses.create(model="tiny", previous_response_id=third.id, input=[])
    assert contents(stored) == ["one", "Hello", "two", "Hello", "three", "Hello"]
    listed: list[Any] = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
    assert [item.content[0].text for item in listed] == ["one", "Hello", "two", "Hello", "three"]
    assert [item.role for item in listed] == ["user", "assistant", "user", "assistant", "user"]
    assert len({item.id for item in listed}) == 5
    newest = await client.responses.input_items.list(third.id, limit=1)
    assert [item.id for item in newest.data] == [listed[-1].id] and newest.has_more
    counted = await client.responses.input_tokens.count(model="tiny", previous_response_id=third.id, input="four")
    assert counted.input_tokens == 40


async def test_calls_and_reasoning_are_kept(tmp_path: Path) -> None:
    """A chain has the calls, their results and the reasoning of earlier turns, as if the client had sent them."""
    call = [CallBegin(0, "f"), ArgumentsDelta(0, '{"x":1}'), CallEnd(0)]
    events = (ReasoningDelta("I think"), TextDelta("so"), *call)
    desk = FakeDesk(scripted(STARTED, Delta(0, "", 9, None, None, events), Closed(record(), None)))
    async with storing(tmp_path, desk) as stored:
        client = stored.client
        first = await client.responses.create(model="tiny", input="one")
        (item,) = [item for item in first.output if item.type == "function_call"]
        result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
        await client.responses.create(model="tiny", previous_response_id=first.id, input=[result])
        (chained,) = desk.tickets[-1].encode.prompts
        history: Any = [{"role": "user", "content": "one"}, *(part.model_dump() for part in first.output), result]
        await client.responses.create(model="tiny", input=history, store=False)
        (sent,) = desk.tickets[-1].encode.prompts
    assert chained.messages == sent.messages
    assert [message["role"] for message in chained.messages] == ["user", "assistant", "tool"]
    assert chained.messages[1]["reasoning_content"] == "I think" and chained.messages[1]["tool_calls"]


async def test_chain_hits_the_cache(tmp_path: Path) -> None:
    """The second turn of a chain has exactly the prompt and the cached tokens of a client that sends the history."""
    async with small_runtime(max_model_len=960) as runtime, storing(tmp_path, runtime.runtime.desk) as stored:

        async def create(**fields: Any) -> Any:
            body = {"model": "demo", "max_output_tokens": 20, "temperature": 0, **fields}
            status, answer = await stored.ask("POST", PATH, body)
            assert status == 200, answer
            return answer

        first = await create(input="A long question, of several blocks. " * 8)
        chained = await create(input="And then?", previous_response_id=first["id"])
        runtime.runtime.desk.reset_prefix_cache()
        again = await create(input="A long question, of several blocks. " * 8, store=False)
        assert again["usage"] == first["usage"]
        history = [{"role": "user", "content": "A long question, of several blocks. " * 8}, *again["output"]]
        sent = await create(input=[*history, {"role": "user", "content": "And then?"}], store=False)
        assert chained["usage"] == sent["usage"]
        cached = chained["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] // 16 * 16 > 0
    runtime.assert_at_rest()


async def test_not_stored(stored: Stored, tmp_path: Path) -> None:
    """With `store` false nothing of a request is in the files, and its id is unknown."""
    given = await stored.client.responses.create(model="tiny", input="not to be found", store=False)
    assert given.model_extra is not None and given.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        await stored.client.responses.retrieve(given.id)
    assert b"not to be found" not in bytes_on_disk(tmp_path)


async def test_deleted(stored: Stored, tmp_path: Path) -> None:
    """A response that was deleted is unknown, and nothing of it is in the files."""
    given = await stored.client.responses.create(model="tiny", input="to be forgotten", metadata={"also": "this label"})
    assert b"to be forgotten" in bytes_on_disk(tmp_path)
    status, answer = await stored.ask("DELETE", f"{PATH}/{given.id}")
    assert (status, answer) == (200, {"id": given.id, "object": "response", "deleted": True})
    data = bytes_on_disk(tmp_path)
    assert not any(text in data for text in (b"to be forgotten", b"this label", b"Hello"))
    for call in (stored.client.responses.retrieve, stored.client.responses.delete, stored.client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(given.id)
    with pytest.raises(openai.BadRequestError) as error:
        await stored.client.responses.create(model="tiny", input="x", previous_response_id=given.id)
    assert error.value.code == "previous_response_not_found" and error.value.param == "previous_response_id"


ROUTES = (
    ("GET", "/v1/responses/{response}"), ("DELETE", "/v1/responses/{response}"),
    ("POST", "/v1/responses/{response}/cancel"), ("GET", "/v1/responses/{response}/input_items"),
    ("GET", "/v1/responses/{response}?stream=true"),
    ("GET", "/v1/conversations/{conversation}"), ("DELETE", "/v1/conversations/{conversation}"),
    ("POST", "/v1/conversations/{conversation}"), ("GET", "/v1/conversations/{conversation}/items"),
    ("POST", "/v1/conversations/{conversation}/items"), ("GET", "/v1/conversations/{conversation}/items/{item}"),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}"),
    ("GET", "/v1/chat/completions/{chat}"), ("POST", "/v1/chat/completions/{chat}"),
    ("DELETE", "/v1/chat/completions/{chat}"), ("GET", "/v1/chat/completions/{chat}/messages"),
)  # fmt: skip


async def test_tenants(stored: Stored) -> None:
    """Another tenant's ids are answered exactly like ids that do not exist, on every route."""
    said: Any = [{"role": "user", "content": "mine"}]
    response = await stored.client.responses.create(model="tiny", input="mine")
    conversation = await stored.client.conversations.create(items=said)
    (item,) = (await stored.client.conversations.items.list(conversation.id)).data
    chat = await stored.client.chat.completions.create(model="tiny", messages=said, store=True)
    ids = {"response": response.id, "conversation": conversation.id, "item": item.id, "chat": chat.id}
    body = {"metadata": {}, "items": said}
    for method, path in ROUTES:
        theirs = await stored.ask(method, path.format_map(ids), body, key="b")
        unknown = {name: "x" * len(value) for name, value in ids.items()}
        none = await stored.ask(method, path.format_map(unknown), body, key="b")
        assert theirs[0] == none[0] == 404, path
        for name, value in ids.items():
            theirs[1]["error"]["message"] = theirs[1]["error"]["message"].replace(value, unknown[name])
        assert theirs == none, path
    for field in ({"previous_response_id": response.id}, {"conversation": conversation.id}):
        theirs = await stored.ask("POST", PATH, {**BODY, **field}, key="b")
        none = await stored.ask("POST", PATH, {**BODY, **dict.fromkeys(field, "x")}, key="b")
        assert theirs[0] == none[0] >= 400 and theirs[1]["error"]["code"] == none[1]["error"]["code"]
    assert (await stored.ask("GET", "/v1/chat/completions", key="b"))[1]["data"] == []
    assert (await stored.client.responses.retrieve(response.id)).id == response.id


@pytest.mark.parametrize("name", ["no.such/thing", "%00", "ü", "x" * 5000, "a b", "%2e%2e"])
async def test_odd_ids(stored: Stored, name: str) -> None:
    """Any text in place of an id is an id that does not exist."""
    for path in (f"/v1/responses/{name}", f"/v1/conversations/{name}", f"/v1/chat/completions/{name}"):
        status, answer = await stored.ask("GET", path)
        assert status == 404 and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
        ("after=nothing", "after"), ("after=%FF", "after"), ("include=", "include"),
    ],
)  # fmt: skip
async def test_bad_pages(stored: Stored, query: str, param: str) -> None:
    """A page that cannot be given is an error that names the parameter."""
    given = await stored.client.responses.create(model="tiny", input="hi")
    status, answer = await stored.ask("GET", f"{PATH}/{given.id}/input_items?{query}")
    assert status == 400 and answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c", "store": False}, "conversation"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation"),
        ({"conversation": 5}, "conversation"),
        ({"conversation": {}}, "conversation.id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": "yes"}, "background"),
        ({"store": "yes"}, "store"),
    ],
)
async def test_bad_fields(stored: Stored, fields: dict[str, Any], param: str) -> None:
    """What cannot be stored or continued is refused by name, before anything is opened."""
    status, answer = await stored.ask("POST", PATH, {**BODY, **fields})
    assert status == 400 and answer["error"]["param"] == param and not stored.desk.tickets


async def test_context_is_as_large_as_a_body(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that has outgrown what a body may have is refused, with its size."""
    monkeypatch.setattr("quipu.web.api.openai.response_state.MAX_MESSAGES", 3)
    first = await stored.client.responses.create(model="tiny", input="1")
    second = await stored.client.responses.create(model="tiny", input="2", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="4 items") as error:
        await stored.client.responses.create(model="tiny", input="3", previous_response_id=second.id)
    assert error.value.code == "conversation_too_long" and error.value.param == "previous_response_id"


async def test_failed_stream_is_stored(tmp_path: Path) -> None:
    """A response that fails in mid-stream is stored as failed, with the items that were sent."""
    broken = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    async with storing(tmp_path, FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), broken))) as stored:
        async with stored.raw.open("POST", PATH, {**BODY, "stream": True}, {"Authorization": "Bearer a"}) as exchange:
            await exchange.wait_started()
            last = read_events(await exchange.read())[-1]
        assert last["response"]["status"] == "failed"
        _, found = await stored.ask("GET", f"{PATH}/{last['response']['id']}")
        assert found == last["response"]


async def test_client_that_leaves(tmp_path: Path) -> None:
    """Nothing remains of a response whose client leaves before it is complete."""
    async with storing(tmp_path, FakeDesk(scripted(STARTED, Delta(0, "half", 1, None)))) as stored:
        body = {**BODY, "input": "left behind", "stream": True}
        async with stored.raw.open("POST", PATH, body, {"Authorization": "Bearer a"}) as exchange:
            await exchange.wait_started()
            name = read_events(await exchange.read_some())[0]["response"]["id"]
            assert (await stored.ask("GET", f"{PATH}/{name}"))[0] == 404, "it is not complete"
            assert b"left behind" in bytes_on_disk(tmp_path)
            exchange.leave()
        await eventually(lambda: b"left behind" not in bytes_on_disk(tmp_path), "it is deleted")
        assert stored.desk.ticket.num_leaves == 1 and stored.store.num_unstored == 0


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("call", ["begin", "end"])
async def test_client_that_leaves_while_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, call: str
) -> None:
    """Nothing remains of what a thread stores, or would have completed, while its client leaves."""
    work, has_begun, may_go_on = getattr(ObjectTables, call), threading.Event(), threading.Event()

    def wait_and_work(*arguments: Any) -> Any:
        has_begun.set()
        may_go_on.wait(30)
        return work(*arguments)

    monkeypatch.setattr(ObjectTables, call, wait_and_work)
    turns = {"input": "left behind"} if path == PATH else {"messages": [{"role": "user", "content": "left behind"}]}
    async with storing(tmp_path) as stored:
        body = {"model": "tiny", "store": True, **turns}
        async with stored.raw.open("POST", path, body, {"Authorization": "Bearer a"}) as exchange:
            await eventually(has_begun.is_set, "it is being stored")
            exchange.leave()
        may_go_on.set()
        assert await stored.store.wait_unused()
        await eventually(lambda: not stored.store.num_leftovers, "it is deleted")
        assert b"left behind" not in bytes_on_disk(tmp_path)


@pytest.mark.parametrize(
    ("path", "maker"), [(PATH, "response_keeper.output_items"), ("/v1/chat/completions", "stored_chats.joined")]
)
async def test_no_memory_for_the_answer_to_store(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, maker: str
) -> None:
    """A stream whose whole answer finds no memory ends with an error; the store keeps nothing of it, and goes on."""
    turns = {"input": "too long"} if path == PATH else {"messages": [{"role": "user", "content": "too long"}]}
    body = {"model": "tiny", "store": True, "stream": True, **turns}

    async def fail(*_: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(f"quipu.web.api.openai.{maker}", fail)
        async with stored.raw.open("POST", path, body, {"Authorization": "Bearer a"}) as exchange:
            await exchange.wait_started()
            assert b"server_error" in await exchange.read()
    await eventually(lambda: not stored.store.num_leftovers, "it is deleted")
    assert b"too long" not in bytes_on_disk(tmp_path)
    assert (await stored.client.responses.create(model="tiny", input="hi")).output_text == "Hello"


def breaking(stored: Stored, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have these methods of the tables fail, as on a full disk."""

    def fail(*_: object, **__: object) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    for name in names:
        monkeypatch.setattr(ObjectTables, name, fail)


@pytest.mark.parametrize("method", ["begin", "end"])
@pytest.mark.parametrize("stream", [False, True])
async def test_answered_though_not_stored(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, method: str, stream: bool
) -> None:
    """A response that cannot be stored is given, says so, and is counted; when the disk works, all is well."""
    with monkeypatch.context() as patched, capture_logs() as lines:
        breaking(stored, patched, method)
        if stream:
            events = [event async for event in await stored.client.responses.create(**BODY, stream=True)]
            given = events[-1].response
        else:
            given = await stored.client.responses.create(**BODY)
        assert given.output_text == "Hello" and given.model_extra["store"] is False
        assert stored.store.num_unstored == 1
        for fields in ({"background": True}, {"previous_response_id": "resp_1"}):
            breaking(stored, patched, "begin", "context")
            status, answer = await stored.ask("POST", PATH, {**BODY, **fields})
            assert (status, answer["error"]["code"]) == (503, "response_store_unavailable")
    assert {"response_store.unavailable", "response_store.not_stored"} <= {line["event"] for line in lines}
    await eventually(lambda: not stored.store.num_leftovers, "what was begun is deleted")
    with pytest.raises(openai.NotFoundError):
        await stored.client.responses.retrieve(given.id)
    again = await stored.client.responses.create(**BODY)
    assert await stored.client.responses.retrieve(again.id) == again


async def test_questions_to_a_broken_store(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs the store gets a 503 with its reason, and a time to come back."""
    breaking(stored, monkeypatch, "find", "delete", "page", "begin", "list_objects")
    asked = (("GET", f"{PATH}/resp_1"), ("DELETE", f"{PATH}/resp_1"), ("GET", f"{PATH}/resp_1/input_items"),
             ("POST", "/v1/conversations"), ("GET", "/v1/chat/completions"))  # fmt: skip
    for method, path in asked:
        with capture_logs():
            status, answer = await stored.ask(method, path)
        assert status == 503 and answer["error"]["code"] == "response_store_unavailable"
        assert "disk is full" in answer["error"]["message"]


async def test_without_a_store() -> None:
    """A server that stores nothing says so, and names the flag."""
    client = Client(make_app(FakeDesk()))
    for path, code in (("responses/r", "response_not_stored"), ("conversations/c", "conversations_not_stored")):
        exchange, answer = await client.get(f"/v1/{path}")
        assert exchange.status == 404 and answer["error"]["code"] == code
        assert "--response-store" in answer["error"]["message"]
    exchange, answer = await client.post(PATH, {**BODY, "store": True})
    assert exchange.status == 200 and answer["store"] is False


async def test_full_store_still_answers(tmp_path: Path) -> None:
    """What does not fit into the store is answered all the same."""
    async with storing(tmp_path, max_bytes=200_000) as stored:
        with capture_logs():
            given = await stored.client.responses.create(model="tiny", input="x" * 300_000)
        assert given.output_text == "Hello" and given.model_extra is not None and given.model_extra["store"] is False
        assert stored.store.trouble is None, "the store itself is well"
        small = await stored.client.responses.create(**BODY)
        assert await stored.client.responses.retrieve(small.id) == small
