"""The official clients' ways to ask for an object or for calls of typed tools, whole and streamed."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from openai.lib.streaming.chat import ContentDoneEvent
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


@UNCLOSED
async def test_responses_parse() -> None:
    """`responses.parse` returns an object, or the arguments of a typed tool."""
    async with scripted_model(REPORT.model_dump_json()) as model, model.openai() as client:
        parsed = await client.responses.parse(model="demo", input="How is it?", text_format=Report)
        assert parsed.output_parsed == REPORT
        async with client.responses.stream(model="demo", input="How is it?", text_format=Report) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == REPORT


async def test_messages_parse() -> None:
    """`messages.parse` returns an object."""
    async with scripted_model(REPORT.model_dump_json()) as model, model.anthropic() as client:
        parsed = await client.messages.parse(
            model="demo",
            max_tokens=100,
            messages=QUESTION,
            output_format=Report,
        )
        assert parsed.parsed_output == REPORT
