"""An engine dies just after a request's Terminal: everything that had arrived counts, and the request is finished."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.scheduler import Submit
from quipu.actors.messages.supervisor import EngineReady
from tests.journals import KeptJournal
from tests.runtimes import Answer, read_answer
from tests.scripted_engine import (
    BLOCK,
    Admit,
    Compute,
    ScriptedEntry,
    ScriptedHost,
    scripted_runtime,
    settle_scripted,
    tokens,
)

PROMPT = list(range(300, 340))
NUM_REQUESTS = 8


def script(submit: Submit) -> Sequence[Sequence[ScriptedEntry]]:
    return [[Admit(0, {}), Compute(0, len(submit.prompt_token_ids))], *tokens(3)]


class DyingHost(ScriptedHost):
    """Its first engine dies once all requests are reported, except for `num_undelivered` reports."""

    num_undelivered = 0

    async def run(self, link: EngineLink) -> Death:
        self._number = 0
        if link.incarnation > 1:
            return await super().run(link)
        await link.deliver([EngineReady(link.incarnation, 64, BLOCK, "scripted", "none")])
        submits: list[Submit] = []
        while len(submits) < NUM_REQUESTS:
            submits += [message for message in await link.take() if isinstance(message, Submit)]
        reports = [(submit.sequence_id, entries) for submit in submits for entries in script(submit)]
        for sequence_id, entries in reports[: len(reports) - self.num_undelivered]:
            await self._report(link, sequence_id, entries)
        # no other task has run since the last report was delivered
        return Death("killed by SIGKILL")


class OneUndelivered(DyingHost):
    num_undelivered = 1


@pytest.mark.parametrize(
    ("make_host", "num_failed"), [(DyingHost, 0), (OneUndelivered, 1)], ids=["all reported", "one missing"]
)
async def test_death_after_the_last_terminal(
    autojump_clock: trio.abc.Clock, make_host: type[DyingHost], num_failed: int
) -> None:
    """Requests whose text, finish reason and Terminal arrived are finished, and nothing is disputed."""
    journal = KeptJournal()
    answers: list[Answer] = []
    async with scripted_runtime(script, journal=journal, make_host=make_host, on_engine_death="fail") as client:
        tickets = [client.open([*PROMPT, 400 + index], max_tokens=3) for index in range(NUM_REQUESTS)]
        for ticket in tickets:
            await ticket.start()
        for ticket in tickets:
            answers.append(await read_answer(ticket))
            ticket.leave()
        assert (await client.ask(PROMPT, max_tokens=3)).error is None
        assert client.runtime.desk.health().incarnation == 2
        await settle_scripted(client)
    failed = [answer for answer in answers if answer.error is not None]
    assert len(failed) == num_failed and all(answer.record.fault is Fault.ENGINE_DIED for answer in failed)
    assert all(answer.reasons == {0: "length"} for answer in answers if answer.error is None)
    outcomes = [record.outcome for record in journal.closed]
    assert outcomes.count(Outcome.FINISHED) == NUM_REQUESTS + 1 - num_failed
    assert not any(record.disputed for record in journal.closed)
