"""The OpenAI client's `responses` against the app, without a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import openai
import pytest

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from tests.web.api.openai.test_openai_client import client_of
from tests.web.fakes import STARTED, FakeDesk, failure, record, scripted


@pytest.fixture(autouse=True)
def _fail_on_serialization_warning() -> Iterator[None]:
    """Fail if the client parsed something that does not serialise as the type that it was parsed as."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


async def test_create() -> None:
    """The whole response works with the client's own helper for its text and names for its numbers."""
    async with client_of(FakeDesk()) as client:
        response = await client.responses.create(model="tiny", input="hi")
        assert response.output_text == "Hello" and response.status == "completed"
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 32
        response.model_dump()


async def test_stream() -> None:
    """The client knows every event; the last one carries the response."""
    async with client_of(FakeDesk()) as client:
        whole = await client.responses.create(model="tiny", input="hi")
        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
        for event in events:
            event.model_dump()
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.usage == whole.usage and last.response.output_text == "Hello"


async def test_stream_helper() -> None:
    """The helper that keeps a snapshot ends with the whole response."""
    async with client_of(FakeDesk()) as client, client.responses.stream(model="tiny", input="hi") as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots == ["Hel", "Hello"]
    assert final.output_text == "Hello" and final.usage is not None and final.usage.total_tokens == 43


async def test_stream_helper_at_the_limit() -> None:
    """The helper reports a response cut by its limit as an event; its final response is only ever a completed one."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "Hel", 3, FinishReason.LENGTH), Closed(record(), None)))
    async with client_of(desk) as client, client.responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            await stream.get_final_response()


# The client drops its generator at the error, and trio warns about it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_error_in_mid_stream_is_raised() -> None:
    """The client raises, so a program that only collects deltas does not take a partial response for a whole one."""
    closed = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), closed))
    async with client_of(desk) as client:
        deltas = []
        with pytest.raises(openai.APIError, match="engine died") as error:
            async for event in await client.responses.create(model="tiny", input="hi", stream=True):
                deltas += [event.delta] if event.type == "response.output_text.delta" else []
        assert deltas == ["half"] and error.value.code == "internal_error"


async def test_errors_have_their_classes() -> None:
    """The client raises its documented exception for each of our errors."""
    async with client_of(FakeDesk()) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model="tiny", input="x", background=True)
        assert bad.value.param == "background"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.retrieve("resp_1")
        assert unknown.value.code == "response_not_stored"
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete("resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list("resp_1")
    async with client_of(FakeDesk(scripted(failure(ErrorKind.INTERNAL)))) as client:
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="tiny", input="x", stream=True)


async def test_output_items_are_valid_input() -> None:
    """The output items of a response are valid input, as sent by clients that keep the history themselves."""
    desk = FakeDesk()
    async with client_of(desk) as client:
        first = await client.responses.create(model="tiny", input="hi")
        history = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
        await client.responses.create(model="tiny", input=[*history, {"role": "user", "content": "and?"}])
    (prompt,) = desk.tickets[-1].encode.prompts
    assert [message["content"] for message in prompt.messages] == ["hi", "Hello", "and?"]
