"""The official clients' ways to ask for an object or for calls of typed tools, whole and streamed."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from openai.lib.streaming.chat import ContentDoneEvent, FunctionToolCallArgumentsDoneEvent
from pydantic import BaseModel

from tests.tools.scripted_model import QUESTION, call, scripted_model


class Day(BaseModel):
    """A day's weather."""

    sky: Literal["clear", "grey"]
    degrees: float | None


class Report(BaseModel):
    """The weather in a city."""

    city: str
    days: list[Day]


class GetWeather(BaseModel):
    """Tell the weather."""

    city: str
    days: int | None


REPORT = Report(city="Øslo", days=[Day(sky="grey", degrees=-3.5), Day(sky="clear", degrees=None)])
CALL = call('{"city": "Oslo", "days": null}', name="GetWeather")


UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""OpenAI's client leaves the generators of a stream to the garbage collector."""


def typed_output(response: Any) -> list[Any]:
    """Return the objects in a response, whether it says them or calls tools with them."""
    calls = [item.parsed_arguments for item in response.output if item.type == "function_call"]
    return [*calls, *([] if response.output_parsed is None else [response.output_parsed])]


@UNCLOSED
async def test_chat_parse() -> None:
    """`chat.completions.parse` and `stream` return objects of the model that describes them."""
    async with scripted_model(REPORT.model_dump_json()) as model, model.openai() as client:
        parsed = await client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Report)
        assert parsed.choices[0].message.parsed == REPORT
        async with client.chat.completions.stream(
            model="demo",
            messages=QUESTION,
            response_format=Report,
        ) as stream:
            done = [event async for event in stream if isinstance(event, ContentDoneEvent)]
        assert [event.parsed for event in done] == [REPORT]


@UNCLOSED
async def test_chat_parse_tools() -> None:
    """A strict tool of a forced call is parsed into its arguments."""
    tool = openai.pydantic_function_tool(GetWeather)
    async with scripted_model(CALL) as model, model.openai() as client:
        for choice in ("auto", "required"):
            parsed = await client.chat.completions.parse(
                model="demo",
                messages=QUESTION,
                tools=[tool],
                tool_choice=choice,
            )
            calls = parsed.choices[0].message.tool_calls
            assert calls is not None
            assert calls[0].function.parsed_arguments == GetWeather(city="Oslo", days=None)
            async with client.chat.completions.stream(
                model="demo",
                messages=QUESTION,
                tools=[tool],
                tool_choice=choice,
            ) as stream:
                done = [event async for event in stream if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
            assert [event.parsed_arguments for event in done] == [GetWeather(city="Oslo", days=None)]


@UNCLOSED
async def test_responses_parse() -> None:
    """`responses.parse` and `stream` return an object, or the arguments of a typed tool."""
    weather: dict[str, Any] = {"tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    wanted: list[tuple[str, BaseModel, dict[str, Any]]] = [
        (REPORT.model_dump_json(), REPORT, {"text_format": Report}),
        (CALL, GetWeather(city="Oslo", days=None), weather),
        (CALL, GetWeather(city="Oslo", days=None), {**weather, "text_format": Report}),
    ]
    async with scripted_model("") as model, model.openai() as client:
        for output, typed, fields in wanted:
            model.says(output)
            fields = {"model": "demo", "input": "How is it?", **fields}
            assert typed_output(await client.responses.parse(**fields)) == [typed]
            async with client.responses.stream(**fields) as stream:
                assert typed_output(await stream.get_final_response()) == [typed]


async def test_messages_parse() -> None:
    """`messages.parse` and `stream` return an object."""
    async with scripted_model(REPORT.model_dump_json()) as model, model.anthropic() as client:
        parsed = await client.messages.parse(
            model="demo",
            max_tokens=100,
            messages=QUESTION,
            output_format=Report,
        )
        assert parsed.parsed_output == REPORT
        async with client.messages.stream(
            model="demo",
            max_tokens=100,
            messages=QUESTION,
            output_format=Report,
        ) as stream:
            assert (await stream.get_final_message()).parsed_output == REPORT
