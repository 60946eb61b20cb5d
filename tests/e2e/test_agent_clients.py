"""Agents as people write them: a tool is called, run, and its result used, with each official client and with
frameworks on top of them. The test writes the model's part: a call, and an answer once there is a result.

The frameworks are imported by the tests that use them: each worker of the test command collects every file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.agents.sessions import token_ids
from tests.e2e.servers import Server, serving
from tests.tools.scripted_model import CHAT_TOOLS, QUESTION, RESPONSES_TOOLS, call

ANSWER = "It is sunny in Oslo."
RESULT = '{"weather": "sunny"}'
OTHERS = '{"city": "Oslo", "days": 3}'
AS_JSON = f"```json\n{OTHERS}\n```"


class Weather(pydantic.BaseModel):
    """Where to look, and how far ahead."""

    city: str
    days: int


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model calls `get_weather`, and answers once there is a result."""
    folder = tmp_path_factory.mktemp("agents")
    (result,) = token_ids("<tool_response>")
    replies = {-1: token_ids(call()), result: token_ids(ANSWER)}
    (folder / "replies.json").write_text(json.dumps(replies))
    flags = ("--executor", "fake", "--fake-step-seconds", "0", "--fake-replies", str(folder / "replies.json"))
    with serving(folder / "server", "demo", *flags) as server:
        yield server
        server.wait_at_rest()


def test_openai_chat(agents: Server) -> None:
    """The loop of a chat agent works, plain and streamed: the model calls a tool, gets the result, and answers."""
    messages: list[Any] = list(QUESTION)
    with agents.client() as client:
        for stream in (False, True):
            first = _chat(client, messages, stream=stream)
            assert first.finish_reason == "tool_calls" and first.message.content is None
            (one,) = first.message.tool_calls
            assert (one.function.name, json.loads(one.function.arguments)) == ("get_weather", {"city": "Oslo"})
            result = {"role": "tool", "tool_call_id": one.id, "content": RESULT}
            last = _chat(client, [*messages, first.message, result], stream=stream)
            assert (last.finish_reason, last.message.content) == ("stop", ANSWER)


def _chat(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> Any:
    fields: dict[str, Any] = {"model": "demo", "messages": messages, "tools": CHAT_TOOLS}
    if not stream:
        return client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as events:
        return events.get_final_completion().choices[0]


def test_openai_responses(agents: Server) -> None:
    """The same loop works with items: the output of the first response becomes part of the second request's input."""
    items: list[Any] = list(QUESTION)
    with agents.client() as client:
        first = client.responses.create(model="demo", input=items, tools=RESPONSES_TOOLS)
        (one,) = first.output
        assert one.type == "function_call" and json.loads(one.arguments) == {"city": "Oslo"}
        result = {"type": "function_call_output", "call_id": one.call_id, "output": RESULT}
        with client.responses.stream(
            model="demo",
            input=[*items, one.model_dump(exclude_none=True), result],
            tools=RESPONSES_TOOLS,
        ) as events:
            assert events.get_final_response().output_text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner(agents: Server, stream: bool) -> None:
    """Anthropic's tool runner runs the called tool itself and ends with the answer."""
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Name of the town
        """
        asked.append(city)
        return RESULT

    fields: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": QUESTION, "tools": [get_weather]}
    with agents.anthropic_client() as client:
        if stream:
            messages = [part.get_final_message() for part in client.beta.messages.tool_runner(**fields, stream=True)]
            final = messages[-1]
        else:
            final = client.beta.messages.tool_runner(**fields).until_done()
    assert asked == ["Oslo"]
    assert final.stop_reason == "end_turn"
    assert "".join(block.text for block in final.content if block.type == "text") == ANSWER


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai(agents: Server, api: str) -> None:
    """An agent of pydantic-ai calls its tool and answers, over each API, and reports token usage."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []

    def get_weather(city: str) -> str:
        """Tell the weather."""
        asked.append(city)
        return RESULT

    async def run() -> Any:
        async with (
            openai.AsyncOpenAI(base_url=f"{agents.url}/v1", api_key="none") as theirs,
            anthropic.AsyncAnthropic(base_url=agents.url, api_key="none") as other,
        ):
            provider = OpenAIProvider(openai_client=theirs)
            models = {
                "chat": OpenAIChatModel("demo", provider=provider),
                "responses": OpenAIResponsesModel("demo", provider=provider),
                "messages": AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=other)),
            }
            agent = Agent(models[api], tools=[get_weather])
            return await agent.run(str(QUESTION[0]["content"]))

    told = asyncio.run(run())
    assert told.output == ANSWER and asked == ["Oslo"]
    assert told.usage.input_tokens > 0 and told.usage.requests == 2


def test_instructor(agents: Server, tmp_path: Path) -> None:
    """Instructor's modes that force no output work: calls that the model chooses to make, and JSON within an answer."""
    import instructor

    calls = call(OTHERS, name="Weather")
    replies = tmp_path / "replies.json"
    flags = ("--executor", "fake", "--fake-step-seconds", "0", "--fake-replies", str(replies))
    wanted = Weather(city="Oslo", days=3).model_dump()
    question: list[Any] = list(QUESTION)
    for output in (calls, AS_JSON):
        replies.write_text(json.dumps({-1: token_ids(output)}))
        with serving(tmp_path / "server", "demo", *flags) as server, server.client() as plain:
            if output is calls:
                parallel = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
                found = parallel.chat.completions.create(
                    model="demo", messages=question, response_model=Iterable[Weather], max_retries=0
                )
                assert [one.model_dump() for one in found] == [wanted]
                with server.anthropic_client() as theirs:
                    parallel = instructor.from_anthropic(theirs, mode=instructor.Mode.PARALLEL_TOOLS)
                    found = parallel.messages.create(
                        model="demo", max_tokens=200, messages=question, response_model=Iterable[Weather], max_retries=0
                    )
                    assert [one.model_dump() for one in found] == [wanted]
            else:
                markdown = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
                one = markdown.chat.completions.create(
                    model="demo", messages=question, response_model=Weather, max_retries=0
                )
                assert one.model_dump() == wanted
