"""What a restarted detokenizer finds in the text store, and how it continues from there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.detokenizer import actor as detokenizer
from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.detokenizer.delivery import Delivery
from quipu.actors.detokenizer.text_store import MAX_REFUSED, DetokenizerMessage, TextStore
from quipu.actors.detokenizer.text_stream import TextStream
from quipu.actors.messages.accountant import Completed, Refused
from quipu.actors.messages.detokenizer import Forget, Tokens, Track
from quipu.actors.messages.prompts import PromptText
from quipu.actors.messages.scores import Scores, StepPayloads
from quipu.actors.restarts import Deaths, keep_running
from quipu.actors.shared.scored_tokens import pack
from tests.crash_scenario import PlannedCrash
from tests.runtimes import kept_decoder, kept_library, text_of
from tests.tiny import TINY


@attrs.define
class Outlet:
    """Keeps a sequence's deltas."""

    deltas: list[Any] = attrs.field(factory=list)

    def put(self, delta: Any, /) -> None:
        self.deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class Workplace:
    """A detokenizer that is restarted, its store, and its messages to the accountant."""

    def __init__(self) -> None:
        self.store = TextStore()
        self.inbox: Channel[DetokenizerMessage] = Channel(1)
        self.accountant: Channel[Completed | Refused] = Channel(1)
        self.deaths = Deaths(
            "detokenizer",
            max_restarts=3,
            window_s=60.0,
            progress=lambda: self.store.progress,
            count=lambda actor: None,
        )

    async def start(self) -> None:
        await Detokenizer(self.store, kept_decoder(kept_library(TINY)), self.accountant, lambda sequence_id: None).run(
            self.inbox
        )

    async def handle(self, *messages: DetokenizerMessage) -> None:
        """Have the messages handled, and wait until they are."""
        with structlog.testing.capture_logs():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_running, self.start, self.deaths, self.store.record_death)
                for message in messages:
                    self.inbox.post(message)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()


def track(sequence_id: int, outlet: Outlet, request_id: str = "r", **fields: Any) -> Track:
    return Track(request_id, sequence_id, 0, (), (), False, True, outlet, **fields)


def tokens(sequence_ids: list[int], token_ids: list[int], scores: list[StepPayloads] | None = None) -> Tokens:
    return Tokens(sequence_ids, token_ids, [], [], scores or [])


def prompt_scores(token_ids: list[int]) -> StepPayloads:
    """Return scores of the prompt of sequence 1, from its second token on."""
    count = len(token_ids)
    packed = pack(Scores(token_ids, [-1.0] * count, token_ids, [[]] * count, [[]] * count))
    return StepPayloads([], Scores.empty(), [1], [1 + count], [packed])


def crash_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    """Have a method raise at its first call, before or after it has done its work."""
    method = getattr(owner, name)
    crashed: list[str] = []

    def crashing(*arguments: Any) -> Any:
        if after:
            result = method(*arguments)
        if not crashed:
            crashed.append(name)
            raise PlannedCrash(name)
        return result if after else method(*arguments)

    monkeypatch.setattr(owner, name, crashing)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["catch_up", "add_payloads", "give"])
async def test_death_while_choices_wait_for_their_prompt(
    monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    """A prompt whose scores come late is scored once, and sent once, before the text that its choices had ready."""
    at_work, outlets = Workplace(), [Outlet(), Outlet()]
    echo = PromptText("abc", 0, (0, 1, 2))
    late = prompt_scores([5, 6])
    await at_work.handle(
        track(1, outlets[0], scores_from=1, num_prompt_scores=2, echo=echo),
        track(2, outlets[1], scores_from=1, num_prompt_scores=2, echo=echo),
        tokens([2], [300]),
        tokens([2, 2], [301, 302]),
    )
    assert not outlets[1].deltas
    crash_once(monkeypatch, Delivery, method, after=after)
    await at_work.handle(tokens([1, 2], [400, 303], [late]))
    assert at_work.deaths.num_restarts == 1
    assert [delta.of_prompt is not None for delta in outlets[1].deltas if delta.num_tokens == 0] == [True]
    assert outlets[0].text == "abc" + text_of([400]) and outlets[1].text == "abc" + text_of([300, 301, 302, 303])
    assert len(at_work.store.prompts[1].scores) == 3 and not at_work.store.deferred


async def test_outlet_that_raises_after_its_sequence_has_ended() -> None:
    """A choice that was complete before its prompt fails if its deltas cannot be sent, and is completed once."""

    class Closed(Outlet):
        def put(self, delta: Any, /) -> None:
            raise PlannedCrash("a handler")

    at_work, outlet = Workplace(), Outlet()
    late = prompt_scores([5])
    await at_work.handle(
        track(1, outlet, scores_from=1, num_prompt_scores=1),
        track(2, Closed(), scores_from=1, num_prompt_scores=1),
        Tokens([2], [300], [2], ["length"]),
        tokens([1], [301], [late]),
    )
    told = [type(message) for message in at_work.accountant.take_nowait()]
    assert told == [Completed, Refused] and at_work.deaths.num_restarts == 0
    assert outlet.text == text_of([301])


async def test_stream_is_rebuilt_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long output is replayed with checkpoints, and only for the sequence whose message was being handled."""
    at_work, outlets = Workplace(), {1: Outlet(), 2: Outlet()}
    ids = list(range(300, 400))
    await at_work.handle(track(1, outlets[1]), track(2, outlets[2]), tokens([1] * 100 + [2] * 100, ids * 2))
    rounds, replayed = 0, []
    clock = iter(range(1_000_000))
    monkeypatch.setattr(detokenizer, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    crash_once(monkeypatch, TextStream, "push", after=True)
    push = TextStream.push

    def counting(stream: TextStream, token_id: int) -> Any:
        replayed.append((rounds, token_id))
        return push(stream, token_id)

    monkeypatch.setattr(TextStream, "push", counting)

    async def count_rounds() -> None:
        nonlocal rounds
        while len(replayed) < 103:
            rounds += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_rounds)
        await at_work.handle(tokens([2, 1], [400, 401]))
    assert [token_id for _, token_id in replayed] == [400, *ids, 400, 401]
    assert len({number for number, _ in replayed}) > 50
    assert [outlets[1].text, outlets[2].text] == [text_of([*ids, 401]), text_of([*ids, 400])]


async def test_repeated_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose last token was sent is completed once, and its text is not sent again."""
    for after in (False, True):
        at_work, outlet = Workplace(), Outlet()
        with monkeypatch.context() as planted:
            crash_once(planted, Delivery, "complete", after=after)
            await at_work.handle(track(1, outlet), Tokens([1, 1], [300, 301], [1], ["length"]))
        (completed,) = at_work.accountant.take_nowait()
        assert isinstance(completed, Completed) and completed.num_completion_tokens == len(outlet.deltas) == 2
        assert at_work.deaths.num_restarts == 1 and not at_work.store.tracked


async def test_ended_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of a sequence after `Forget`, and only so many refused requests that killed the detokenizer."""
    at_work = Workplace()

    def dying(*_: object) -> None:
        raise PlannedCrash("always")

    await at_work.handle(track(1, Outlet()), tokens([1], [300]), Forget((1,)))
    monkeypatch.setattr(Delivery, "give", dying)
    for sequence_id in range(2, MAX_REFUSED + 10):
        outlet = Outlet()
        await at_work.handle(track(sequence_id, outlet, f"r{sequence_id}"), tokens([sequence_id], [300]))
        assert not outlet.deltas
    store = at_work.store
    assert len(store.refused) == MAX_REFUSED and not store.tracked and not store.pending
    told = at_work.accountant.take_nowait()
    assert sum(isinstance(message, Refused) for message in told) == MAX_REFUSED + 8
    assert store.in_hand is None and store.torn is None
