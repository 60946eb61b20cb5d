"""Links for tests that run an engine's host without a runtime, or watch what it delivers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import attrs

from quipu.actors.channel import Channel
from quipu.actors.fleet.supervisor import EngineLink
from quipu.actors.messages.accountant import EngineDied, StepReport
from quipu.actors.request_desk.adapters import Adapters
from quipu.actors.request_desk.engine_pool import EnginePool
from quipu.actors.request_desk.interface import ServingInfo
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.router.route_store import RouterMessage
from tests.no_adapters import no_adapters
from tests.runtimes import runtime_config, serving_info


@attrs.define
class LinkDesk:
    """What a link needs of the request desk."""

    sequences: LiveSequences
    pool: EnginePool
    info: ServingInfo
    adapters: Adapters


def make_link(reports: Channel[StepReport | EngineDied] | None = None, incarnation: int = 1) -> EngineLink:
    """Return the link of the only engine, whose reports go to `reports`."""
    router, pool = Channel[RouterMessage](1), EnginePool()
    desk = LinkDesk(LiveSequences(router, 1), pool, serving_info(runtime_config()), no_adapters())
    accountant = Channel[StepReport | EngineDied](8) if reports is None else reports
    return EngineLink(pool.add(), incarnation, desk, accountant, router, mock.Mock())


@attrs.frozen
class _WatchedLink:
    _link: EngineLink
    deliver: Callable[[Any], Awaitable[None]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def with_deliver(link: EngineLink, deliver: Callable[[Any], Awaitable[None]]) -> Any:
    """Return a link like `link` with another `deliver`: methods of an object with slots cannot be replaced."""
    return _WatchedLink(link, deliver)
