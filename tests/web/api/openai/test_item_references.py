"""Items of an input that refer to stored ones, and look-ups of requests that continue what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from quipu.web.api.bodies import FREE_BYTES
from quipu.web.api.openai import item_references
from quipu.web.app import make_app
from tests.runtimes import small_runtime
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk
from tests.web.stored import Stored, storing

PATH, COUNT, LOOKUP = "/v1/responses", "/v1/responses/input_tokens", "/v1/cache/lookup"
DEEP = b"[" * 1000 + b"]" * 1000
LONG = "A long question, of several blocks. " * 8


def referring(*ids: str) -> Any:
    return [{"type": "item_reference", "id": item_id} for item_id in ids]


async def test_read_like_the_item_itself(tmp_path: Path) -> None:
    """What an input refers to becomes the same prompt as if the client had sent it, and is stored with the response."""
    async with storing(tmp_path) as stored:
        client: openai.AsyncOpenAI = stored.client
        first = await client.responses.create(model="tiny", input="one")
        (asked,) = (await client.responses.input_items.list(first.id)).data
        answer = first.output[0]
        ids = asked.id or "", answer.id or ""
        then: Any = [*referring(*ids), {"role": "user", "content": "two"}]
        second = await client.responses.create(model="tiny", input=then)
        (prompt,) = stored.desk.tickets[-1].encode.prompts
        assert [message["content"] for message in prompt.messages] == ["one", "Hello", "two"]
        counted = await client.responses.input_tokens.count(model="tiny", input=then)
        assert counted.input_tokens == 40
        await client.responses.delete(first.id)
        await client.responses.create(model="tiny", input=[], previous_response_id=second.id)
        (prompt,) = stored.desk.tickets[-1].encode.prompts
        assert [message["content"] for message in prompt.messages] == ["one", "Hello", "two", "Hello"]
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model="tiny", input=referring(answer.id or ""))
        assert gone.value.code == "item_not_found" and gone.value.param == "input[0].id"


async def test_of_the_own_tenant_alone(tmp_path: Path) -> None:
    """The item of another tenant is answered exactly like one that does not exist."""
    async with storing(tmp_path) as stored:
        first = await stored.client.responses.create(model="tiny", input="one")
        known = first.output[0].id or ""
        told = []
        for item_id in (known, "msg_none"):
            body = {"model": "tiny", "input": [{"role": "user", "content": "x"}, *referring(item_id)]}
            status, answer = await stored.ask("POST", PATH, body, key="b")
            told.append((status, answer["error"]["message"].replace(item_id, "ID"), answer["error"]["param"]))
        assert told[0] == told[1] and told[0][0] == 404 and told[0][2] == "input[1].id"
        assert (await stored.ask("POST", PATH, {"model": "tiny", "input": referring(known)}))[0] == 200


async def test_type_may_be_absent(tmp_path: Path) -> None:
    """What has neither a type nor a role but an id is a reference; without a store it is refused like one."""
    async with storing(tmp_path) as stored:
        first = await stored.client.responses.create(model="tiny", input="one")
        ids: Any = [{"id": first.output[0].id}, {"id": first.output[0].id, "type": None}]
        await stored.client.responses.create(model="tiny", input=ids)
        (prompt,) = stored.desk.tickets[-1].encode.prompts
        assert [message["content"] for message in prompt.messages] == ["Hello", "Hello"]
    for item, param in (({"id": "msg_r1"}, "input[0]"), ({}, "input[0].type"), ({"id": None}, "input[0].type")):
        _, answer = await Client(make_app(FakeDesk())).post(PATH, {"model": "tiny", "input": [item]})
        assert answer["error"]["param"] == param


@pytest.mark.parametrize("item_id", ["", "x" * 500, "msg", "resp_r1", "msg_r1_i99", "msg_r1_iX"])
async def test_odd_ids(tmp_path: Path, item_id: Any) -> None:
    """Anything else in place of an id is an item that does not exist."""
    async with storing(tmp_path) as stored:
        await stored.client.responses.create(model="tiny", input="one")
        body = {"model": "tiny", "input": [{"type": "item_reference", "id": item_id}]}
        status, answer = await stored.ask("POST", PATH, body)
        assert (status, answer["error"]["code"]) == (404, "item_not_found")


@pytest.mark.parametrize(
    ("item_id", "code"), [(b"null", "missing_required_parameter"), (b"5", "invalid_type"), (DEEP, "invalid_type")]
)
async def test_no_id(tmp_path: Path, item_id: bytes, code: str) -> None:
    """What is no text is named as such, however deeply it is nested."""
    async with storing(tmp_path) as stored:
        body = b'{"model":"tiny","input":[{"role":"user","content":"x"},{"type":"item_reference","id":%b}]}' % item_id
        status, answer = await stored.ask("POST", PATH, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, "input[1].id"), answer


async def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are not too many of them, and they do not bring more than a body may have; without a store, none."""
    async with storing(tmp_path) as stored:
        first = await stored.client.responses.create(model="tiny", input="one")
        ids = [first.output[0].id or ""] * 3
        monkeypatch.setattr(item_references, "MAX_REFERENCES", 2)
        await _refused(stored, referring(*ids), "at most 2 items")
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, {"model": "tiny", "input": referring("msg_r1")})
    assert exchange.status == 400 and answer["error"]["param"] == "input[0]"
    assert "--response-store" in answer["error"]["message"]


async def test_memory_of_what_is_read(tmp_path: Path) -> None:
    """What a body continues or refers to takes memory of bodies, where it is only counted or looked up, too."""
    async with storing(tmp_path) as stored:
        items: Any = [{"role": "user", "content": "x" * 100_000}]
        first = await stored.client.responses.create(model="tiny", input=items)
        (asked,) = (await stored.client.responses.input_items.list(first.id)).data
        stored.raw.app.bodies.max_bytes = FREE_BYTES
        for fields in ({"previous_response_id": first.id, "input": "y"}, {"input": referring(asked.id or "")}):
            body = {"model": "tiny", **fields}
            for path, sent in ((PATH, body), (COUNT, body), (LOOKUP, {"url": PATH, "body": body})):
                status, answer = await stored.ask("POST", path, sent)
                assert (status, answer["error"]["code"]) == (503, "overloaded"), path
        assert stored.raw.app.bodies.num_bytes == 0


async def _refused(stored: Stored, items: Any, message: str) -> None:
    status, answer = await stored.ask("POST", PATH, {"model": "tiny", "input": items})
    assert status == 400 and answer["error"]["param"] == "input" and message in answer["error"]["message"]


async def test_looked_up_as_served(tmp_path: Path) -> None:
    """A look-up of a request that continues something stored tells the numbers that the request then reports."""
    async with small_runtime(max_model_len=960) as runtime, storing(tmp_path, runtime.runtime.desk) as stored:

        async def create(**fields: Any) -> Any:
            body = {"model": "demo", "max_output_tokens": 20, "temperature": 0, **fields}
            status, answer = await stored.ask("POST", PATH, body)
            assert status == 200, answer
            return answer

        async def compare(**fields: Any) -> int:
            asked = {"url": PATH, "body": {"model": "demo", "max_output_tokens": 20, "temperature": 0, **fields}}
            status, looked_up = await stored.ask("POST", LOOKUP, asked)
            assert status == 200, looked_up
            (prompt,) = looked_up["prompts"]
            usage = (await create(**fields))["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            assert (prompt["prompt_tokens"], prompt["cached_tokens"]) == (usage["input_tokens"], cached)
            return int(cached)

        first = await create(input=LONG)
        least = first["usage"]["input_tokens"] // 16 * 16
        assert await compare(input="And then?", previous_response_id=first["id"]) >= least > 0
        _, asked = await stored.ask("GET", f"{PATH}/{first['id']}/input_items")
        ids = asked["data"][0]["id"], first["output"][0]["id"]
        assert await compare(input=[*referring(*ids), {"role": "user", "content": "And now?"}]) >= least
        _, talk = await stored.ask("POST", "/v1/conversations", {"items": [{"role": "user", "content": LONG}]})
        assert await compare(input="What else?", conversation=talk["id"]) >= least // 2
        status, answer = await stored.ask(
            "POST", LOOKUP, {"url": PATH, "body": {"model": "demo", "previous_response_id": "resp_none", "input": "x"}}
        )
        assert status == 400 and answer["error"]["code"] == "previous_response_not_found"
    runtime.assert_at_rest()
