"""Clients that do not read: their common backlog is bounded, and is released however they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import FinishReason
from quipu.web.app import QuipuApp, make_app
from quipu.web.http.unread_limit import UnreadLimit, unread_limit_of_run
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import STARTED, FakeDesk, record, scripted

STREAM = {"model": "tiny", "prompt": "x", "stream": True}
LIMIT = 20_000


def app_of(desk: FakeDesk) -> QuipuApp:
    return make_app(desk, AppOptions(all_sinks_limit_bytes=LIMIT))


@asynccontextmanager
async def readers(app: QuipuApp, num: int) -> AsyncIterator[list[Exchange]]:
    """Return `num` clients whose streams have begun and who do not read."""
    async with AsyncExitStack() as stack:
        exchanges = []
        for _ in range(num):
            exchange = await stack.enter_async_context(Client(app, buffer=0).open("POST", "/v1/completions", STREAM))
            await exchange.wait_started()
            exchanges.append(exchange)
        await trio.testing.wait_all_tasks_blocked()
        yield exchanges


def unread_limit() -> UnreadLimit:
    return unread_limit_of_run(0)


async def test_client_with_most_unread_is_cut_off() -> None:
    """Only the client with the most unread bytes is cut off, not the one whose chunk exceeded the limit."""
    desk = FakeDesk(scripted(STARTED))
    async with readers(app_of(desk), 3):
        for index, num_chunks in ((0, 4), (1, 26), (2, 12)):
            for _ in range(num_chunks):
                desk.tickets[index].mailbox.put(Delta(0, "x" * 500, 1, None))
                await trio.testing.wait_all_tasks_blocked()
        assert [ticket.num_leaves for ticket in desk.tickets] == [0, 1, 0]
        assert 0 < unread_limit().num_bytes <= LIMIT and len(unread_limit()) == 2
    await trio.testing.wait_all_tasks_blocked()
    assert unread_limit().num_bytes == 0 and len(unread_limit()) == 0


@pytest.mark.parametrize("is_read", [True, False])
async def test_ended_stream_keeps_nothing(is_read: bool) -> None:
    """A stream that ends releases its bytes, whether it was read or not."""
    desk = FakeDesk(scripted(STARTED))
    async with readers(app_of(desk), 1) as (exchange,):
        for _ in range(10):
            desk.ticket.mailbox.put(Delta(0, "x" * 500, 1, None))
            await trio.testing.wait_all_tasks_blocked()
        desk.ticket.mailbox.put(Delta(0, "", 1, FinishReason.STOP))
        desk.ticket.mailbox.put(Closed(record(), None))
        await trio.testing.wait_all_tasks_blocked()
        assert unread_limit().num_bytes > 4000
        if is_read:
            while not exchange.ended:
                await exchange.read_some()
        else:
            exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert unread_limit().num_bytes == 0 and len(unread_limit()) == 0
