"""Helper for the tests of other servers' own endpoints: an app over an engine that always draws the same letter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from quipu.actors.messages.tokenizer import Encode
from quipu.kernels.fake import Dials
from quipu.web.app import make_app
from tests.journals import KeptJournal
from tests.runtimes import small_runtime
from tests.traps.wire import over_http
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

LETTER_A = 67
"""The token that is drawn."""


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Client, KeptJournal]]:
    """Yield a client, and the books of its requests."""
    journal = KeptJournal()
    async with small_runtime(Dials(only_token_id=LETTER_A), journal=journal) as runtime:
        yield over_http(runtime), journal
        runtime.assert_at_rest()


async def ask(path: str, client: Client, **fields: Any) -> Any:
    """Return the answer to a body, which must be served."""
    exchange, answer = await client.post(path, fields)
    assert exchange.status == 200, answer
    return answer


async def encoded(path: str, **fields: Any) -> Encode:
    """Return what reaches the desk of a body."""
    desk = FakeDesk()
    await ask(path, Client(make_app(desk)), **fields)
    return desk.ticket.encode
