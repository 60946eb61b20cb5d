"""Reports of several engines: a lost one, or one after its engine's death, affects no other engine's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio
from structlog.testing import capture_logs

from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import StepReport
from tests.links import with_deliver
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, kill_engine, small_runtime
from tests.traps.wire import samples, settle

LOST = 5
"""Number of the report of engine 0 that is lost."""
NUM_TOKENS = 40
"""Enough that an engine needs a block in the middle of an answer, however many tokens a step yields."""


class LosingHost(LoopHost):
    async def run(self, link: EngineLink) -> Death:
        async def deliver_rest(messages: Iterable[object]) -> None:
            lost = [m for m in messages if isinstance(m, StepReport) and m.number == LOST and link.engine_id == 0]
            await link.deliver([message for message in messages if message not in lost])

        return await super().run(with_deliver(link, deliver_rest))


async def ask_both(client: Client) -> list[Answer]:
    """Send one request to each of the two engines, the second shortly after the first."""
    answers: list[Answer] = []

    async def ask(seed: int) -> None:
        answers.append(await client.ask(prompt_of(70, seed), max_tokens=NUM_TOKENS))

    async with trio.open_nursery() as nursery:
        for seed in range(2):
            nursery.start_soon(ask, seed)
            await trio.sleep(0.02)
    return sorted(answers, key=lambda answer: answer.record.engine or 0)


async def test_lost_report(autojump_clock: trio.abc.Clock) -> None:
    """Only the request of the engine whose report was lost is disputed."""
    async with small_runtime(num_engines=2, routing="round-robin", make_host=LosingHost) as client:
        with capture_logs():
            answers = await ask_both(client)
            await settle(client)
        assert [answer.record.engine for answer in answers] == [0, 1]
        assert [answer.record.disputed for answer in answers] == [True, False]
        assert samples(client)["usage_disputed_total"] == 1


async def test_report_after_a_death(autojump_clock: trio.abc.Clock) -> None:
    """A report of an incarnation that was declared dead changes no account and sends no token."""
    async with small_runtime(num_engines=2, restart_backoff_s=60.0) as client:
        seen: list[StepReport] = []
        accounts: Any = client.runtime.desk._accountant  # noqa: SLF001 - the accountant's inbox

        def watched(send: Callable[[object], bool]) -> Callable[[object], bool]:
            def watch(message: object) -> bool:
                is_sent = send(message)
                if is_sent and isinstance(message, StepReport) and message.engine_id == 0:
                    seen.append(message)
                return is_sent

            return watch

        accounts.deliver_now, accounts.send_nowait = watched(accounts.deliver_now), watched(accounts.send_nowait)
        with capture_logs() as lines:
            async with trio.open_nursery() as nursery:
                answers: list[list[Answer]] = []

                async def ask() -> None:
                    answers.append(await ask_both(client))

                nursery.start_soon(ask)
                await trio.sleep(0.05)
                kill_engine(client, 0)
                with trio.fail_after(1):  # until it needs another block
                    while client.runtime.desk.engines()[0].deaths == 0:
                        await trio.sleep(0.001)
                last = seen[-1]
                assert last.token_ids
                accounts.post(msgspec.structs.replace(last, number=last.number + 1))
        assert [line["incarnation"] for line in lines if line["event"] == "report.of_dead_engine"] == [last.incarnation]
        await settle(client)
        (both,) = answers
        assert all(answer.record.completion_tokens == NUM_TOKENS and not answer.record.disputed for answer in both)
        assert samples(client)["usage_disputed_total"] == 0
