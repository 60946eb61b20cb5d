"""Conversations and stored chat completions, with the official client and raw requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.web.request.request_context import IGNORED_FIELDS_HEADER
from tests.actors.response_store.stores import bytes_on_disk
from tests.web.stored import Stored, storing

CHATS, CONVERSATIONS = "/v1/chat/completions", "/v1/conversations"
SAID: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    async with storing(tmp_path) as stored:
        yield stored


async def test_conversation(stored: Stored) -> None:
    """Items are listed as they came, with those of responses; metadata is replaced; deleting leaves the responses."""
    conversations = stored.client.conversations
    made = await conversations.create(items=SAID, metadata={"topic": "x"})
    assert made.object == "conversation" and made.metadata == {"topic": "x"}
    assert await conversations.retrieve(made.id) == made
    answer = await stored.client.responses.create(model="tiny", input="and?", conversation={"id": made.id})
    assert answer.conversation is not None and answer.conversation.id == made.id
    (prompt,) = stored.desk.tickets[-1].encode.prompts
    assert [message["content"] for message in prompt.messages] == ["hi", "ho", "and?"]
    listed: list[Any] = [item async for item in conversations.items.list(made.id, order="asc", limit=1)]
    assert [item.content[0].text for item in listed] == ["hi", "ho", "and?", "Hello"]
    await stored.client.responses.create(model="tiny", conversation=made.id)
    (prompt,) = stored.desk.tickets[-1].encode.prompts
    assert [message["content"] for message in prompt.messages][:4] == ["hi", "ho", "and?", "Hello"]
    added = await conversations.items.create(made.id, items=[{"role": "user", "content": "more"}])
    assert (await conversations.items.retrieve(added.data[0].id, conversation_id=made.id)) == added.data[0]
    assert (await conversations.items.delete(added.data[0].id, conversation_id=made.id)).id == made.id
    for call in (conversations.items.retrieve, conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            await call(added.data[0].id, conversation_id=made.id)
    assert (await conversations.update(made.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
    assert (await conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(made.id)
    assert await stored.client.responses.retrieve(answer.id) == answer


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "x"}, "items"),
        ({"items": [{"role": "nobody", "content": "x"}]}, "items[0].role"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ],
)
async def test_bad_conversations(stored: Stored, body: Any, param: str) -> None:
    """What could not be continued is refused by name, and nothing of it is stored."""
    status, answer = await stored.ask("POST", CONVERSATIONS, body)
    assert status == 400 and answer["error"]["param"] == param
    made = await stored.client.conversations.create()
    status, answer = await stored.ask("POST", f"{CONVERSATIONS}/{made.id}/items", body)
    assert status == 400 and answer["error"]["param"] in (param, "items")
    assert [item async for item in stored.client.conversations.items.list(made.id)] == []


async def test_unknown_fields_are_named(stored: Stored) -> None:
    """Fields that are not read of a conversation, its items, or new metadata are named in the header."""
    items: Any = [{"role": "user", "content": "x", "colour": 1}]
    conversations = stored.client.conversations.with_raw_response
    made = await conversations.create(items=items, extra_body={"title": "t"})
    changed = await conversations.update(made.parse().id, metadata={"a": "b"}, extra_body={"meta": 1})
    begun = await stored.client.chat.completions.create(model="tiny", messages=SAID[:1], store=True)
    chats = stored.client.chat.completions.with_raw_response
    relabelled = await chats.update(begun.id, metadata={"a": "b"}, extra_body={"meta": 1})
    named = [answer.headers.get(IGNORED_FIELDS_HEADER) for answer in (made, changed, relabelled)]
    assert named == ["title,items[0].colour", "meta", "meta"]


# The client drops its generators at [DONE], and trio warns about them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("stream", [False, True])
async def test_stored_chat(stored: Stored, tmp_path: Path, stream: bool) -> None:
    """A stored chat completion is fetched as it was given, listed, relabelled and deleted without a trace."""
    chats = stored.client.chat.completions
    fields: dict[str, Any] = {"model": "tiny", "messages": SAID, "store": True, "metadata": {"k": "a-label"}}
    if stream:
        name = [chunk.id async for chunk in await chats.create(**fields, stream=True)][-1]
        found = await chats.retrieve(name)
    else:
        given = await chats.create(**fields)
        found = await chats.retrieve(given.id)
        assert found.to_dict() == {**given.to_dict(), "metadata": {"k": "a-label"}}
        name = given.id
    assert found.choices[0].message.content == "Hello" and found.usage is not None
    messages = [message async for message in chats.messages.list(name, limit=1)]
    assert [(message.id, message.content) for message in messages] == [(f"{name}-0", "hi"), (f"{name}-1", "ho")]
    assert [chat.id async for chat in chats.list(metadata={"k": "a-label"}, model="tiny")] == [name]
    assert [chat.id async for chat in chats.list(metadata={"k": "another"})] == []
    assert (await chats.update(name, metadata={"k": "b"})).to_dict()["metadata"] == {"k": "b"}
    assert (await chats.delete(name)).deleted
    assert not any(text in bytes_on_disk(tmp_path) for text in (b"a-label", b"Hello", name.encode()))
    with pytest.raises(openai.NotFoundError):
        await chats.retrieve(name)


async def test_messages_with_ids_of_their_own(stored: Stored) -> None:
    """Messages are listed under the server's ids, by which the next page is asked for, whatever the client sent."""
    messages: Any = [{**message, "id": "mine"} for message in SAID]
    made = await stored.client.chat.completions.create(model="tiny", messages=messages, store=True)
    listed = [message async for message in stored.client.chat.completions.messages.list(made.id, limit=1)]
    assert [(message.id, message.content) for message in listed] == [(f"{made.id}-0", "hi"), (f"{made.id}-1", "ho")]


async def test_chat_that_is_not_stored(stored: Stored, tmp_path: Path) -> None:
    """Without `store` nothing is kept of a chat, and its metadata has no effect, which the header says."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "unkept"}], "metadata": {"a": "b"}}
    async with stored.raw.open("POST", CHATS, body, {"Authorization": "Bearer a"}) as exchange:
        await exchange.json()
    assert exchange.headers["x-quipu-ignored-fields"] == "metadata"
    assert b"unkept" not in bytes_on_disk(tmp_path)
    status, answer = await stored.ask("POST", CHATS, {**body, "store": True, "metadata": {"a": 1}})
    assert status == 400 and answer["error"]["param"] == "metadata"


async def test_pages_of_chats(stored: Stored) -> None:
    """Chats are listed page by page, the oldest first."""
    chats = stored.client.chat.completions
    names = [(await chats.create(model="tiny", messages=SAID, store=True)).id for _ in range(5)]
    assert [chat.id async for chat in chats.list(limit=2)] == names
    assert [chat.id async for chat in chats.list(limit=2, order="desc")] == names[::-1]
    status, answer = await stored.ask("GET", f"{CHATS}?after=nothing")
    assert status == 400 and answer["error"]["param"] == "after"
    status, answer = await stored.ask("GET", f"{CHATS}?metadata=x")
    assert status == 400 and answer["error"]["param"] == "metadata"


@pytest.mark.parametrize("method", ["begin", "end"])
async def test_chat_is_answered_though_not_stored(stored: Stored, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A chat completion that cannot be stored is given all the same, and counted."""

    def fail(*_: object) -> Any:
        raise OSError("no space left")

    with capture_logs(), monkeypatch.context() as patched:
        patched.setattr(ObjectTables, method, fail)
        given = await stored.client.chat.completions.create(model="tiny", messages=SAID, store=True)
        assert given.choices[0].message.content == "Hello"
        assert stored.store.num_unstored == 1
    with pytest.raises(openai.NotFoundError):
        await stored.client.chat.completions.retrieve(given.id)
