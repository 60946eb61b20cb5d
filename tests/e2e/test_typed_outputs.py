"""Objects of pydantic models, requested as users do: with the common clients, in their default modes.

The model has random weights, so only the server's grammars make its output an object of the type; the values in it are
not checked. The frameworks are imported by the tests that use them: each worker of the test command collects every
file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import attrs
import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.servers import Server
from tests.openai_httpx import httpx
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

MAX_TOKENS = 400
"""For APIs and clients that require a limit; objects of the types below are far shorter."""
QUESTION: list[Any] = [{"role": "user", "content": "Who is it? Answer in JSON."}]
ASKED = QUESTION[0]["content"]
CHAT_KINDS = ("default", "function_calling", "json_schema")


class Home(BaseModel):
    """An address."""

    model_config = ConfigDict(extra="forbid")

    code: str = Field(pattern="^[0-9]{5}$")


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    mood: Literal["good", "bad"]
    home: Home | None = None
    tags: list[Literal["a", "b"]] = Field(default_factory=list, max_length=2)


class Choice(BaseModel):
    """An object that is short even if a client sends no lengths, as Anthropic's does."""

    model_config = ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]
    is_sure: bool


class Shelf(BaseModel):
    """An object with a keyword that no grammar enforces."""

    tags: set[Literal["a", "b"]] = Field(max_length=2)


class Note(BaseModel):
    """An object without required fields."""

    text: str | None = None


@attrs.frozen
class Clients:
    """Clients of the tiny model, which fail a test if the server ignores any of their fields."""

    url: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


def nothing_ignored(answer: Any) -> None:
    assert "x-quipu-ignored-fields" not in answer.headers, answer.headers


async def nothing_ignored_async(answer: Any) -> None:
    nothing_ignored(answer)


@pytest.fixture
def clients(tiny: Server) -> Iterator[Clients]:
    hooks: Any = {"response": [nothing_ignored]}
    with httpx.Client(event_hooks=hooks) as http, httpx2.Client(event_hooks=hooks) as http2:
        yield Clients(
            tiny.url,
            openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, http_client=http),
            anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0, http_client=http2),
        )


def only_braces() -> dict[str, float]:
    """Return a bias that makes a model write an empty object where any object is allowed and no schema would end it."""
    vocabulary = Vocabulary(TINY)
    return {str(token_id): 100.0 for brace in "{}" for token_id in vocabulary.encoder.encode_within_text(brace)}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_openai(clients: Clients, mode: str) -> None:
    """Instructor's modes with a schema give objects of the type; `TOOLS`, a forced call, is the default."""
    import instructor

    chosen = {} if mode == "TOOLS" else {"mode": instructor.Mode[mode]}
    client = instructor.from_openai(clients.openai, **chosen)
    person = client.chat.completions.create(model="demo", messages=QUESTION, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
    if mode != "RESPONSES_TOOLS":
        *_, last = client.chat.completions.create_partial(
            model="demo", messages=QUESTION, response_model=Person, max_retries=0
        )
        assert Person(**last.model_dump())


def test_instructor_with_a_set(tiny: Server) -> None:
    """A tool that is not strict may have keywords that are not enforced; the client is told which."""
    import instructor

    told: list[str] = []
    hooks: Any = {"response": [lambda answer: told.append(answer.headers["x-quipu-ignored-fields"])]}
    with httpx.Client(event_hooks=hooks) as http:
        theirs = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, http_client=http)
        shelf = instructor.from_openai(theirs).chat.completions.create(
            model="demo", messages=QUESTION, response_model=Shelf, max_retries=0
        )
    assert shelf.tags <= {"a", "b"}
    assert told == ["tools[0].function.parameters%23%2Fproperties%2Ftags%2FuniqueItems"]


def test_instructor_json(clients: Clients) -> None:
    """Instructor's `JSON` mode gives some JSON object."""
    import instructor

    client = instructor.from_openai(clients.openai, mode=instructor.Mode.JSON)
    note = client.chat.completions.create(
        model="demo", messages=QUESTION, response_model=Note, max_retries=0, logit_bias=only_braces()
    )
    assert isinstance(note, Note) and note.text is None


def test_instructor_anthropic(clients: Clients) -> None:
    """Instructor's default mode for Anthropic, a forced call, gives an object of the type."""
    import instructor

    client = instructor.from_anthropic(clients.anthropic)
    person = client.messages.create(
        model="demo", max_tokens=MAX_TOKENS, messages=QUESTION, response_model=Person, max_retries=0
    )
    assert isinstance(person, Person)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai(tiny: Server, api: str) -> None:
    """An agent of pydantic-ai gets its `output_type` from a forced call, plain or streamed, or from JSON output."""
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> None:
        hooks: Any = {"response": [nothing_ignored_async]}
        async with (
            openai.AsyncOpenAI(
                base_url=f"{tiny.url}/v1",
                api_key="none",
                max_retries=0,
                http_client=httpx.AsyncClient(event_hooks=hooks),
            ) as theirs,
            anthropic.AsyncAnthropic(
                base_url=tiny.url, api_key="none", max_retries=0, http_client=httpx2.AsyncClient(event_hooks=hooks)
            ) as other,
        ):
            provider = OpenAIProvider(openai_client=theirs)
            model: Any = {
                "chat": lambda: OpenAIChatModel("demo", provider=provider),
                "responses": lambda: OpenAIResponsesModel("demo", provider=provider),
                "messages": lambda: AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=other)),
            }[api]()
            limit: Any = {"max_tokens": MAX_TOKENS} if api == "messages" else {}
            wanted: list[Any] = [Person, [Person, Home]]
            if api != "messages":  # of this client's models, only those that it knows support it
                wanted.append(NativeOutput(Person))
            for output_type in wanted:
                agent = Agent(model, output_type=output_type, retries=0, model_settings=limit)
                assert isinstance((await agent.run(ASKED)).output, Person | Home)
            agent = Agent(model, output_type=Person, retries=0, model_settings=limit)
            async with agent.run_stream(ASKED) as stream:
                assert isinstance(await stream.get_output(), Person)
            if api == "chat":
                bias: Any = {"logit_bias": only_braces()}
                agent = Agent(model, output_type=PromptedOutput(Note), retries=0, model_settings=bias)
                assert (await agent.run(ASKED)).output == Note()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own copy of a parsed message
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_openai(clients: Clients, api: str) -> None:
    """`with_structured_output` gives objects of the type with each method, and streamed with the default one."""
    from langchain_openai import ChatOpenAI

    fields: Any = {"model": "demo", "base_url": f"{clients.url}/v1", "api_key": "none", "max_retries": 0}
    with httpx.Client(event_hooks={"response": [nothing_ignored]}) as http:
        model = ChatOpenAI(**fields, http_client=http, use_responses_api=api == "responses")
        for method in CHAT_KINDS:
            chosen: Any = {} if method == "default" else {"method": method}
            assert isinstance(model.with_structured_output(Person, **chosen).invoke(ASKED), Person)
        strict = model.with_structured_output(Person, method="function_calling", strict=True)
        assert isinstance(strict.invoke(ASKED), Person)
        *_, last = model.with_structured_output(Person).stream(ASKED)
        assert isinstance(last, Person)
        if api == "chat":
            free = ChatOpenAI(**fields, http_client=http, logit_bias={int(k): 100 for k in only_braces()})
            assert free.with_structured_output(Note, method="json_mode").invoke(ASKED) == Note()


def test_langchain_anthropic(tiny: Server) -> None:
    """`with_structured_output` does the same over Anthropic's API, where the default is a forced call."""
    from langchain_anthropic import ChatAnthropic

    fields: Any = {"model": "demo", "base_url": tiny.url, "api_key": "none", "max_retries": 0}
    model = ChatAnthropic(**fields, max_tokens=MAX_TOKENS)
    assert isinstance(model.with_structured_output(Person).invoke(ASKED), Person)
    assert isinstance(model.with_structured_output(Choice, method="json_schema").invoke(ASKED), Choice)
    *_, last = model.with_structured_output(Person).stream(ASKED)
    assert isinstance(last, Person)
