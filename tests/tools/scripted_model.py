"""The whole server in one event loop, before a model that writes what a test tells it to.

Vocabulary, chat template and formats are the demo checkpoint's: tool calls in the Hermes form, thoughts between
`<think>` and `</think>`. Requests come through the real HTTP application, from the official clients or as they are.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import attrs
import httpx2
import openai

from quipu.actors.shared.checkpoint import resolve
from quipu.kernels.fake import Dials
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.openai_httpx import httpx
from tests.runtimes import Client, kept_library, small_runtime
from tests.traps.wire import settle

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
END = "<|im_end|>"

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "Tell the weather.", "parameters": WEATHER_SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": WEATHER}]
MESSAGES_TOOLS = [{"name": "get_weather", "description": "Tell the weather.", "input_schema": WEATHER_SCHEMA}]
RESPONSES_TOOLS = [{"type": "function", **WEATHER}]
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]

TOOLS: dict[str, list[dict[str, Any]]] = {CHAT: CHAT_TOOLS, MESSAGES: MESSAGES_TOOLS, RESPONSES: RESPONSES_TOOLS}


def call(arguments: str = '{"city": "Oslo"}', name: str = "get_weather") -> str:
    """Return a call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def body(endpoint: str, tools: Mapping[str, Any] = TOOLS, **fields: Any) -> dict[str, Any]:
    """Return a request with a question and the tools in its API's form."""
    limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    prompt = {"input": QUESTION} if endpoint == RESPONSES else {"messages": QUESTION}
    return {"model": "demo", **prompt, "tools": tools[endpoint], limit: 400, **fields}


@cache
def demo_folder() -> Path:
    return resolve("demo")


@attrs.define
class ScriptedModel:
    client: Client
    app: Any
    _http: httpx2.AsyncClient

    def says(self, output: str) -> None:
        """Have the model write `output`, and end, in answer to every request from now on."""
        self.client.dials.replies = {-1: self.tokens(output)}

    def tokens(self, text: str) -> Sequence[int]:
        encoded = kept_library(demo_folder()).encode(text, max_tokens=1 << 20, add_special_tokens=False)
        assert not isinstance(encoded, int)
        return list(encoded)

    async def ask(self, endpoint: str, **fields: Any) -> dict[str, Any]:
        """Return the whole answer to a request with a question and a tool, with `fields`."""
        answer = await self.send(endpoint, body(endpoint, **fields))
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def stream(self, endpoint: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer."""
        return self.events_of(await self.send(endpoint, body(endpoint, stream=True, **fields)))

    @staticmethod
    def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def end(self) -> int:
        """The token that ends an output."""
        end = kept_library(demo_folder()).tokenizer.token_to_id(END)
        assert isinstance(end, int)
        return end

    async def send(self, endpoint: str, request: dict[str, Any]) -> httpx2.Response:
        return await self._http.post(endpoint, json=request)

    @asynccontextmanager
    async def openai(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app)) as http:
            yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)

    @asynccontextmanager
    async def anthropic(self) -> AsyncIterator[anthropic.AsyncAnthropic]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app)) as http:
            yield anthropic.AsyncAnthropic(
                base_url="http://test",
                api_key="none",
                http_client=http,
                max_retries=0,
                _strict_response_validation=True,
            )


@asynccontextmanager
async def scripted_model(output: str, **changes: Any) -> AsyncIterator[ScriptedModel]:
    """Serve a model that answers every request with `output`. At the end, nothing may be left of any request."""
    library = kept_library(demo_folder())
    end = library.tokenizer.token_to_id(END)
    settings: dict[str, Any] = {
        "model_path": str(demo_folder()),
        "eos_token_ids": (end,),
        "max_num_batched_tokens": 1024,
    }
    settings |= {"num_blocks": 256, "max_model_len": 4000, **changes}
    async with small_runtime(Dials(eos_token_id=end), **settings) as client:
        app = make_app(client.runtime.desk, AppOptions(domain="tenant"))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            model = ScriptedModel(client, app, http)
            model.says(output)
            yield model
            await settle(client)
