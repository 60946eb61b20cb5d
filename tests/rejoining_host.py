"""An engine in this loop whose connection can be cut, and which then comes back as another incarnation."""

from __future__ import annotations

from typing import Any

import trio

from quipu.actors.channel import Channel
from quipu.actors.engine.engine import PLAN_SLOTS, Engine, LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import StepReport

REASON = "the connection was cut"


class RejoiningHost(LoopHost):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: Engine | None = None
        """The only engine that this host ever makes."""
        self._is_cut = trio.Event()

    def cut(self) -> None:
        """Cut the connection: what the engine has sent and was not delivered is lost."""
        self._is_cut.set()

    async def run(self, link: EngineLink) -> Death:
        if self.kept is None:
            self.kept = Engine(self._config, self._load(self._config))
        else:
            await self.kept.rejoin()
        engine = self.engine = self.kept
        self._is_cut = trio.Event()
        reports: Channel[StepReport] = Channel(PLAN_SLOTS)

        async def feed() -> None:
            while True:
                for message in await link.take():
                    await engine.receive(message)

        async def tell() -> None:
            while True:
                await link.deliver(await reports.receive_all())

        await link.deliver([engine.ready(link.incarnation)])
        async with trio.open_nursery() as nursery:
            for task in (feed, tell):
                nursery.start_soon(task)
            nursery.start_soon(engine.run, reports)
            await self._is_cut.wait()
            link.lost(REASON)
            nursery.cancel_scope.cancel()
        return Death(REASON)
