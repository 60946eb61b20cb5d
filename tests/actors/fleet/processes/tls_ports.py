"""Authorities, files and ports of TLS between a web process and engines, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
import trio

from quipu.actors.fleet.processes.link_handshake import LinkTicket
from quipu.actors.fleet.processes.link_port import LinkPort
from quipu.actors.fleet.processes.link_tls import LinkTls
from quipu.actors.fleet.processes.tcp_way import TcpWay
from tests.actors.fleet.processes.test_link_port import HOST
from tests.authorities import Authority

FIRST = 3


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> LinkTls:
    return authority.files(HOST)


@asynccontextmanager
async def open_port(tls: LinkTls | None) -> AsyncIterator[LinkPort]:
    port = LinkPort(HOST, 0, None if tls is None else tls.host_context())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port.run)
        yield port
        nursery.cancel_scope.cancel()
    port.close()


def way_of(port: LinkPort, ticket: LinkTicket, lifeline: tuple[int, int], tls: LinkTls | None) -> TcpWay:
    return TcpWay(lifeline[0], *port.address, ticket, tls)


@pytest.fixture
def past(authority: Authority) -> LinkTls:
    now = datetime.now(UTC)
    return authority.files(HOST, not_before=now - timedelta(days=9), not_after=now - timedelta(days=1))
