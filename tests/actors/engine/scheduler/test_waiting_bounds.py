"""Limits on waiting requests: a request is accepted or refused as a whole, and no tenant takes all the room."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.scheduler.admission import AdmissionControl, make_sequence
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.waiting import Policy, WaitingQueue
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, small_runtime

MANY = 512


async def busy(client: Client, nursery: trio.Nursery) -> None:
    """Occupy the runtime's only sequence slot for the whole test."""
    nursery.start_soon(lambda: client.ask(prompt_of(20, 0), max_tokens=800))
    await trio.sleep(0.05)


async def ask_all(client: Client, requests: list[tuple[int, str]]) -> list[Answer]:
    """Send requests, each given as number of sequences and tenant, in this order and concurrently."""
    answers: dict[int, Answer] = {}

    async def one(index: int, num: int, tenant: str) -> None:
        prompts = [prompt_of(5, 1000 * index + at) for at in range(num)]
        answers[index] = await client.ask(*prompts, max_tokens=1, domain=tenant)

    async with trio.open_nursery() as nursery:
        for index, (num, tenant) in enumerate(requests):
            nursery.start_soon(one, index, num, tenant)
            await trio.testing.wait_all_tasks_blocked()
    return [answers[index] for index in range(len(requests))]


def are_refused(answers: list[Answer]) -> list[bool]:
    for answer in answers:
        if answer.error is not None:
            assert (answer.error.kind, answer.record.outcome) == (ErrorKind.OVERLOADED, Outcome.REJECTED)
            assert answer.record.cached_tokens is None and answer.record.completion_tokens == 0
    return [answer.error is not None for answer in answers]


async def test_request_is_refused_as_a_whole(autojump_clock: trio.abc.Clock) -> None:
    """Nothing is computed for a request that does not fit; one that fits gets all its places before the
    next request."""
    async with small_runtime(max_num_seqs=1, max_waiting_requests=10) as client, trio.open_nursery() as nursery:
        await busy(client, nursery)
        answers = await ask_all(client, [(6, "a"), (5, "a"), (4, "a"), (1, "a")])
        nursery.cancel_scope.cancel()
    assert are_refused(answers) == [False, True, False, True]


async def test_waiting_tokens_are_bounded_per_request(autojump_clock: trio.abc.Clock) -> None:
    """A limit on waiting prompt tokens, of which each sequence has five, also admits or refuses whole requests."""
    async with small_runtime(max_num_seqs=1, max_waiting_tokens=50) as client, trio.open_nursery() as nursery:
        await busy(client, nursery)
        answers = await ask_all(client, [(6, "a"), (5, "a"), (4, "a"), (1, "a")])
        nursery.cancel_scope.cancel()
    assert are_refused(answers) == [False, True, False, True]


async def test_request_with_many_sequences_is_not_split(autojump_clock: trio.abc.Clock) -> None:
    """A request with more sequences than the queue to the engines holds is accepted while others arrive in between."""
    async with small_runtime(max_num_seqs=4, max_waiting_requests=MANY - 4, submit_slots=8) as client:
        answers = await ask_all(client, [(MANY, "a"), (1, "a")])
        client.assert_at_rest()
    assert answers[0].error is None and len(answers[0].texts) == MANY


async def test_request_that_can_never_fit(autojump_clock: trio.abc.Clock) -> None:
    """A request that could never fit gets a 400, even on an idle engine: retrying would not help."""
    async with small_runtime(max_num_seqs=4, max_waiting_requests=10) as client:
        (answer,) = await ask_all(client, [(15, "a")])
        (served,) = await ask_all(client, [(14, "a")])
        client.assert_at_rest()
    assert answer.error is not None and answer.error.kind is ErrorKind.INVALID
    assert served.error is None


async def test_long_prompt_on_idle_engine(autojump_clock: trio.abc.Clock) -> None:
    """A prompt longer than the limit on waiting tokens is accepted if it does not have to wait."""
    async with small_runtime(max_num_seqs=2, max_waiting_tokens=10) as client:
        answer = await client.ask(prompt_of(500, 1), max_tokens=1)
        client.assert_at_rest()
    assert answer.error is None


@pytest.mark.parametrize("bound", [{"max_waiting_requests": 10}, {"max_waiting_tokens": 50}])
async def test_tenant_share_of_waiting_room(autojump_clock: trio.abc.Clock, bound: dict[str, int]) -> None:
    """With `max_waiting_share` 0.5, one tenant may use half of the waiting room, and the rest is left for others."""
    async with (
        small_runtime(max_num_seqs=1, max_waiting_share=0.5, **bound) as client,
        trio.open_nursery() as nursery,
    ):
        await busy(client, nursery)
        answers = await ask_all(client, [*[(1, "greedy")] * 8, (3, "b"), (2, "c"), (1, "c")])
        nursery.cancel_scope.cancel()
    assert are_refused(answers) == [False] * 5 + [True] * 3 + [False, False, True]


async def test_leaving_requests_free_their_places(autojump_clock: trio.abc.Clock) -> None:
    """Places kept for sequences that were never submitted are freed as well, and nothing remains of any of them."""
    async with small_runtime(max_num_seqs=1, max_waiting_requests=100, submit_slots=1) as client:
        async with trio.open_nursery() as nursery:
            await busy(client, nursery)
            for num_checkpoints in range(0, 60, 3):
                ticket = client.open(*[prompt_of(5, at) for at in range(100)], max_tokens=1)
                await ticket.start()
                for _ in range(num_checkpoints):
                    await trio.lowlevel.checkpoint()
                ticket.leave()
                await trio.testing.wait_all_tasks_blocked()
                assert client.engine.batcher.num_groups == 0
            assert are_refused(await ask_all(client, [(100, "a")])) == [False]
            nursery.cancel_scope.cancel()
        await trio.sleep(1)
        client.assert_at_rest()


def submit(sequence_id: int, tenant: str, *, group_id: int, to_come: int) -> Submit:
    tokens = [1] * 3
    sampling = SamplingParams(max_tokens=1)
    return Submit(
        sequence_id,
        tokens,
        b"",
        [],
        sampling,
        tenant,
        group_id=group_id,
        num_to_come=to_come,
        tokens_to_come=3 * to_come,
    )


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from("ab"), st.integers(1, 6)), max_size=12),
    st.integers(1, 12),
    st.sampled_from([0.5, 1.0]),
)
def test_places_are_kept_for_expected_sequences(requests: list[tuple[int, str, int]], bound: int, share: float) -> None:
    """No sequence is refused after the first of its request, and waiting and expected sequences stay within the
    limits."""
    limits = SchedulerConfig(
        block_size=1,
        num_blocks=10,
        max_num_seqs=1,
        max_num_batched_tokens=10,
        max_model_len=10,
        max_waiting_requests=bound,
        max_waiting_share=share,
    )
    admission, waiting = AdmissionControl(limits), WaitingQueue(Policy.FCFS)
    num_waiting = {"a": 0, "b": 0}
    next_id = 1
    for size, tenant, num_that_come in requests:
        group_id, let_in = next_id, None
        for at in range(min(size, num_that_come)):
            message = submit(next_id + at, tenant, group_id=group_id, to_come=size - at - 1)
            refusal = admission.refusal_of(message, waiting, 1)
            assert let_in in (None, refusal is None)
            let_in = refusal is None
            if let_in:
                waiting.push(make_sequence(message, next_id + at, limits))
                num_waiting[tenant] += 1
        if num_that_come < size:
            admission.end_group(group_id)
        assert admission.num_groups == 0
        next_id += size
        assert sum(num_waiting.values()) == len(waiting) <= bound
        assert num_waiting[tenant] == waiting.num_of(tenant) <= -(-bound * share // 1)
        assert waiting.num_tokens_of(tenant) == 3 * num_waiting[tenant]


def test_later_sequences_of_a_list_have_the_places_of_those_that_ended() -> None:
    """A sequence that takes the place of another one of its request is accepted however many wait."""
    limits = SchedulerConfig(
        block_size=1,
        num_blocks=10,
        max_num_seqs=1,
        max_num_batched_tokens=10,
        max_model_len=10,
        max_waiting_requests=2,
    )
    admission, waiting = AdmissionControl(limits), WaitingQueue(Policy.FCFS)
    for sequence_id in (1, 2):
        waiting.push(make_sequence(submit(sequence_id, "a", group_id=0, to_come=0), sequence_id, limits))
    message = submit(3, "a", group_id=3, to_come=0)
    assert admission.refusal_of(message, waiting, 1) is not None
    assert admission.refusal_of(attrs.evolve(message, takes_place=True), waiting, 1) is None
