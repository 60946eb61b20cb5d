"""Lists of more prompts than engines may hold of one request, through all actors, on the fake executor."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.engine.scheduler.admission import AdmissionControl
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.scheduler import SequenceKind, Submit
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.kernels.fake import Dials
from tests.fake_oracle import embedding
from tests.runtimes import Answer, Client, assert_nothing_routed, kill_engine, read_answer, small_runtime

WINDOW = 4
PROMPTS = [[7 + at, 9, 11] for at in range(23)]
EMBED: dict[str, Any] = {"kind": SequenceKind.EMBED, "max_tokens": 0}
SETUP: dict[str, Any] = {"submit_window": WINDOW, "max_num_seqs": 2}
SLOW = Dials(step_seconds=0.01)


async def assert_at_rest(client: Client) -> None:
    """Assert that nothing is left once the last step is over and every actor has heard of its end."""
    while client.runtime.desk.num_live_sequences:
        await trio.sleep(0.001)
    await assert_nothing_routed(client)
    client.assert_at_rest()


async def until_submitted(ticket: OpenRequest, count: int) -> None:
    """Wait until `count` prompts of a request are submitted."""
    while len(ticket.submitted_ids) < count:
        await trio.sleep(0.001)


def assert_all_answered(answer: Answer, prompts: list[list[int]] = PROMPTS) -> None:
    assert answer.error is None
    assert answer.vectors == {index: embedding(prompt) for index, prompt in enumerate(prompts)}
    record = answer.record
    assert (record.outcome, record.disputed, record.num_choices) == (Outcome.FINISHED, False, len(prompts))
    assert record.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_window_at_a_time(autojump_clock: trio.abc.Clock, num_engines: int) -> None:
    """Engines hold a window of a long list at most, in order; each prompt has its vector, and there is one record."""
    held: list[int] = []
    async with small_runtime(SLOW, **SETUP, num_engines=num_engines) as client:
        ticket = client.open(*PROMPTS, **EMBED)
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                for count in range(1, len(PROMPTS) + 1):
                    await until_submitted(ticket, count)
                    held.append(client.runtime.desk.num_live_sequences)

            nursery.start_soon(watch)
            await ticket.start()
            answer = await read_answer(ticket)
        ticket.leave()
        await assert_at_rest(client)
        assert client.records == [answer.record]
    assert max(held) == WINDOW
    assert_all_answered(answer)
    assert ticket.submitted_ids == sorted(ticket.submitted_ids) and len(ticket.submitted_ids) == len(PROMPTS)


async def test_texts_are_released_before_all_are_submitted(autojump_clock: trio.abc.Clock) -> None:
    """What a body takes of the memory for bodies is released while the last prompts wait for room."""
    async with small_runtime(SLOW, **SETUP) as client:
        ticket = client.open(*PROMPTS, **EMBED)
        released: list[int] = []
        ticket.when_encoded(lambda: released.append(len(ticket.submitted_ids)))
        await ticket.start()
        assert_all_answered(await read_answer(ticket))
        ticket.leave()
        await assert_at_rest(client)
    assert released == [WINDOW]


@pytest.mark.parametrize("how", ["leaves", "is late", "fails"])
async def test_ends_within_the_list(autojump_clock: trio.abc.Clock, how: str) -> None:
    """A client that leaves, a deadline and a prompt that fails end a request whose last prompts wait for room."""
    dials = attrs.evolve(SLOW, poison_token_id=7 + 10) if how == "fails" else SLOW
    async with small_runtime(dials, **SETUP) as client:
        ticket = client.open(*PROMPTS, **EMBED)
        await ticket.start()
        answer = None
        if how != "fails":
            await until_submitted(ticket, 10)
        if how == "is late":
            ticket.expire(1.0)
        if how != "leaves":
            answer = await read_answer(ticket)
        ticket.leave()
        await assert_at_rest(client)
        num_submitted, records = len(ticket.submitted_ids), client.records
        assert_all_answered(await client.ask(PROMPTS[0], **EMBED), PROMPTS[:1])
    assert 10 <= num_submitted < len(PROMPTS)
    assert records is not None
    kinds = {"leaves": None, "is late": ErrorKind.TIMEOUT, "fails": ErrorKind.INTERNAL}
    outcome = Outcome.CANCELLED if how == "leaves" else Outcome.FAILED
    assert records[0].outcome is outcome and not records[0].disputed
    assert kinds[how] is (None if answer is None or answer.error is None else answer.error.kind)


async def test_no_room_for_a_window(autojump_clock: trio.abc.Clock) -> None:
    """A list is accepted if there is room for a window of it, and refused as a whole if there is not."""
    async with small_runtime(SLOW, **SETUP, max_waiting_requests=2 * WINDOW - 2) as client:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await client.ask(*PROMPTS, **EMBED))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
                await trio.sleep(0.005)
        await assert_at_rest(client)
    refused, *answered = answers
    assert refused.error is not None and refused.error.kind is ErrorKind.OVERLOADED
    assert refused.record.outcome is Outcome.REJECTED
    for answer in answered:
        assert_all_answered(answer)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_engine_dies_within_the_list(autojump_clock: trio.abc.Clock, num_engines: int) -> None:
    """The prompts that a dead engine held are computed by another one, and the list goes on."""
    async with small_runtime(SLOW, **SETUP, num_engines=num_engines) as client:
        ticket = client.open(*PROMPTS, **EMBED)
        await ticket.start()
        await until_submitted(ticket, 10)
        kill_engine(client)
        assert_all_answered(await read_answer(ticket))
        ticket.leave()
        await assert_at_rest(client)


async def test_only_the_first_window_may_be_refused(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of the first window are announced together; each later one takes the place of one that has ended."""
    sent: list[Submit] = []
    refusal_of = AdmissionControl.refusal_of

    def noting(self: AdmissionControl, message: Submit, *arguments: Any) -> Any:
        sent.append(message)
        return refusal_of(self, message, *arguments)

    monkeypatch.setattr(AdmissionControl, "refusal_of", noting)
    async with small_runtime(SLOW, **SETUP) as client:
        await client.ask(*PROMPTS, **EMBED)
    assert [message.takes_place for message in sent] == [at >= WINDOW for at in range(len(PROMPTS))]
    assert [message.num_to_come for message in sent] == [3, 2, 1, 0] + [0] * (len(PROMPTS) - WINDOW)
    assert [message.tokens_to_come for message in sent[:WINDOW]] == [9, 6, 3, 0]


async def test_choices_are_submitted_together(autojump_clock: trio.abc.Clock) -> None:
    """Once the first choice of a prompt is submitted, the others do not wait for room: they were announced with it."""
    num_choices = WINDOW + 2
    async with small_runtime(SLOW, **SETUP) as client:
        ticket = client.open(*PROMPTS[:3], n=num_choices, max_tokens=2)
        await ticket.start()
        live: list[int] = []
        for at in range(3):
            await until_submitted(ticket, 1 + at * num_choices)
            await trio.testing.wait_all_tasks_blocked()
            live.append(len(ticket.submitted_ids))
        answer = await read_answer(ticket)
        ticket.leave()
        await assert_at_rest(client)
    assert live == [num_choices, 2 * num_choices, 3 * num_choices]
    assert answer.error is None and answer.record.num_choices == len(answer.texts) == 3 * num_choices
