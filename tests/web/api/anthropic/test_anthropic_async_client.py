"""Anthropic's asynchronous client against the app, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx2
import pytest

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, Outcome, RequestError
from quipu.web.app import make_app
from tests.web.fakes import STARTED, FakeDesk, failure, record, scripted


@asynccontextmanager
async def client_of(desk: FakeDesk) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app=make_app(desk))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(
            base_url="http://test", api_key="none", http_client=http, max_retries=0, _strict_response_validation=True
        )


ASKED = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


async def test_whole_and_streamed() -> None:
    """The message is the same whole and streamed, and tokens can be counted."""
    async with client_of(FakeDesk()) as client:
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        assert whole.content[0].text == final.content[0].text == "Hello"
        assert whole.usage == final.usage and whole.usage.cache_read_input_tokens == 32
        counted = await client.messages.count_tokens(model="tiny", messages=ASKED["messages"])
        assert counted.input_tokens == 40
        assert [model.id async for model in client.models.list()] == ["org/tiny", "tiny"]


# The client drops its generators when it raises, and trio warns about them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_errors_have_their_classes() -> None:
    """Errors raise the class of their status before the first token, and that of the event after it."""
    async with client_of(FakeDesk(scripted(failure(ErrorKind.OVERLOADED)))) as client:
        with pytest.raises(anthropic.InternalServerError) as overloaded:
            await client.messages.create(**ASKED)
        assert overloaded.value.status_code == 529 and overloaded.value.type == "overloaded_error"
    failed = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    async with client_of(FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), failed))) as client:
        with pytest.raises(anthropic.APIStatusError, match="engine died"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
