"""Helper for the tests of request bodies: what reaches the desk, and what the client is told was ignored."""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.output import OutputFormat
from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.messages.tokenizer import Encode
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk

IGNORED = "x-quipu-ignored-fields"
THINKING = OutputFormat(
    reasoning_parser="qwen3",
    reasoning_tags=("<think>", "</think>"),
    template_variables=frozenset({"enable_thinking", "reasoning_effort", "documents"}),
)
"""A model whose reasoning can be switched on and off."""
PLAIN = OutputFormat()


@attrs.frozen
class Asked:
    """One request that was accepted."""

    encode: Encode
    ignored: str | None
    answer: Any

    @property
    def prompt(self) -> ChatPrompt:
        (prompt,) = self.encode.prompts
        assert isinstance(prompt, ChatPrompt)
        return prompt

    @property
    def callable_names(self) -> list[str]:
        assert self.encode.output is not None
        return list(self.encode.output.tool_types)

    @property
    def max_calls(self) -> int | None:
        assert self.encode.output is not None
        return self.encode.output.max_calls


async def ask(path: str, body: dict[str, Any], output: OutputFormat = PLAIN) -> Asked:
    """Send a request that must be accepted."""
    desk = FakeDesk(info=attrs.evolve(INFO, output=output))
    exchange, answer = await Client(make_app(desk)).post(path, body)
    assert exchange.status == 200, answer
    return Asked(desk.ticket.encode, exchange.headers.get(IGNORED), answer)


async def refused(path: str, body: dict[str, Any]) -> tuple[str | None, str]:
    """Send a request that must be refused, and return the named field and the message."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, body)
    assert exchange.status == 400, answer
    assert not desk.tickets
    error = answer["error"]
    return error.get("param"), error["message"]
