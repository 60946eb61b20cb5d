"""OpenAI's client against the app, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from quipu.actors.messages.outcomes import ErrorKind
from quipu.web.app import make_app
from tests.openai_httpx import httpx
from tests.web.fakes import FakeDesk, failure, scripted


@asynccontextmanager
async def client_of(desk: FakeDesk) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=make_app(desk))
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


# The client drops its generators at [DONE], and trio warns about them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_chat() -> None:
    """Whole and streamed chat give the same text, and usage details under the client's names."""
    async with client_of(FakeDesk()) as client:
        whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 32

        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage == whole.usage


async def test_completions() -> None:
    """A list of prompts gives as many choices."""
    async with client_of(FakeDesk()) as client:
        answer = await client.completions.create(model="tiny", prompt=[[1, 2], [3]])
        assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]


async def test_errors_have_their_classes() -> None:
    """The client raises its documented exception for each of our errors."""
    async with client_of(FakeDesk()) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="huge", prompt="x")
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", temperature=3)
        assert bad.value.param == "temperature"
    async with client_of(FakeDesk(scripted(failure(ErrorKind.INTERNAL)))) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="x", stream=True)


async def test_models() -> None:
    """The client can page through the list of models."""
    async with client_of(FakeDesk()) as client:
        assert [model.id async for model in client.models.list()] == ["org/tiny", "tiny"]
