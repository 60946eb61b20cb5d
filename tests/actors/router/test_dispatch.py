"""Whatever happens to engines and requests, each sequence is sent to one ready engine at a time, and none is lost."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quipu.actors.channel import Channel
from quipu.actors.messages.accountant import Routed
from quipu.actors.messages.router import EngineClosing, EngineDown, EngineUp, SequenceEnded
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Abort, ResetPrefixCache, Submit
from quipu.actors.request_desk.engine_pool import EnginePool
from quipu.actors.request_desk.live_sequence import submit_again
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.router.dispatch import Dispatch
from quipu.actors.router.route_store import RouterMessage, RouteStore
from quipu.actors.router.routing import Routing

BLOCK = 4
NUM_ENGINES = 3
NO_DESK: Any = None
"""For requests that nobody starts or abandons."""


def submit(sequence_id: int, prompt: int, *, group_id: int = 0, num_to_come: int = 0) -> Submit:
    keys = [bytes([prompt, depth]).ljust(32, b".") for depth in range(5)]
    return Submit(
        sequence_id, list(range(20)), b"", keys, SamplingParams(max_tokens=4), group_id=group_id,
        num_to_come=num_to_come,
    )  # fmt: skip


class Posts:
    """Keeps the messages to the accountant."""

    def __init__(self) -> None:
        self.messages: list[Routed] = []

    def post(self, message: Routed, /) -> None:
        self.messages.append(message)


@attrs.define
class Taken:
    """A sequence that an engine has taken."""

    submit: Submit
    engine_id: int
    is_aborted: bool = False


class Engines(RuleBasedStateMachine):
    """Engines come and go, requests too; a model of each engine takes what is queued for it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = EnginePool()
        for _ in range(NUM_ENGINES):
            self.pool.add()
        self.channel = Channel[RouterMessage](1)
        self.sequences = LiveSequences(self.channel, 1000)
        self.sequences.on_unsent = self.end_unsent
        self.store = RouteStore(Routing(block_size=BLOCK, prefill_budget=64, seed=1))
        self.posts = Posts()
        self.dispatch = Dispatch(self.store, self.pool, self.sequences, self.posts, resume_on="any")
        self.up: dict[int, int] = {}
        """Ready engines, and their incarnations."""
        self.closing: set[int] = set()
        self.taken: dict[int, Taken] = {}
        self.open: dict[int, Submit] = {}
        """Sequences that have not ended."""
        self.next_id = 1

    # ------------------------------------------------------------ what happens

    def send(self, *messages: RouterMessage) -> None:
        """Have the router handle messages that arrive together, and what follows from them."""
        self.store.add(messages)
        while self.store.reports or self.store.prompts:
            queue, handle = (
                (self.store.reports, self.dispatch.handle_news)
                if self.store.reports
                else (self.store.prompts, self.dispatch.handle_prompt)
            )
            handle(queue[0])
            self.store.take_off(queue)
            self.store.add(self.channel.take_nowait())

    @rule(prompt=st.integers(0, 3), num_choices=st.integers(1, 3))
    def submit_prompt(self, prompt: int, num_choices: int) -> None:
        group_id = self.next_id if num_choices > 1 else 0
        request = OpenRequest(f"r{self.next_id}", NO_DESK, None)
        for index in range(num_choices):
            message = submit(self.next_id, prompt, group_id=group_id, num_to_come=num_choices - index - 1)
            self.sequences.put(message, request)
            self.open[self.next_id] = message
            self.next_id += 1
        self.send(*self.channel.take_nowait())

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.open)))
        self.sequences.abort(sequence_id)
        self.send(*self.channel.take_nowait())

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def come(self, engine_id: int) -> None:
        if engine_id not in self.up and engine_id not in self.closing:
            self.up[engine_id] = self.pool.next_incarnation()
            self.send(EngineUp(engine_id, self.up[engine_id], 100, "same"))

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def die(self, engine_id: int) -> None:
        """Have an engine die; what it held is submitted again."""
        incarnation = self.up.pop(engine_id, None)
        if incarnation is None:
            return
        self.send(EngineDown(engine_id, incarnation))
        held = {i: its for i, its in self.taken.items() if its.engine_id == engine_id}
        again = []
        for sequence_id, its in held.items():
            del self.taken[sequence_id]
            if its.is_aborted:
                self.end(sequence_id)
            else:
                again.append(self.sequences._live[sequence_id])  # noqa: SLF001 - taking back would need an accountant
        self.send(*submit_again(again))

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def close(self, engine_id: int) -> None:
        self.closing.add(engine_id)
        self.send(EngineClosing(engine_id))

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def reopen(self, engine_id: int) -> None:
        """Stand for a removed engine and a new one."""
        if engine_id in self.closing and engine_id not in self.up:
            self.closing.discard(engine_id)

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def take(self, engine_id: int) -> None:
        """Have an engine take what is queued for it."""
        if engine_id not in self.up:
            return
        for message in self.pool[engine_id].queue.take_nowait():
            match message:
                case Submit():
                    assert message.sequence_id not in self.taken, "sent twice"
                    assert message.sequence_id in self.open, "sent after its end"
                    self.taken[message.sequence_id] = Taken(message, engine_id)
                case Abort(sequence_id, ends_group=False):
                    if (its := self.taken.get(sequence_id)) is not None:
                        assert its.engine_id == engine_id, "an abort must follow its sequence"
                        its.is_aborted = True

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[sequence_id]
        self.end(sequence_id)

    @precondition(lambda self: self.closing & {its.engine_id for its in self.taken.values() if not its.is_aborted})
    @rule()
    def hand_over(self) -> None:
        """Have a closing engine end what it holds, so that others continue it."""
        for sequence_id, its in list(self.taken.items()):
            if its.engine_id in self.closing and not its.is_aborted:
                del self.taken[sequence_id]
                self.send(attrs.evolve(self.open[sequence_id], is_resumed=True, num_to_come=0))

    def teardown(self) -> None:
        """Let everything end, after which nothing may be left."""
        for engine_id in list(self.up):
            self.die(engine_id)
        self.closing.clear()
        self.come(0)
        self.take(0)
        for sequence_id in list(self.taken):
            del self.taken[sequence_id]
            self.end(sequence_id)
        self.loads_are_of_what_is_there()
        assert (self.open, self.store.unrouted, self.store.sequences) == ({}, {}, {})

    def end_unsent(self, sequence_id: int) -> None:
        assert not self.up.keys() - self.closing, "a ready engine must get it"
        del self.open[sequence_id]
        self.sequences.mark_ended(sequence_id)

    def end(self, sequence_id: int) -> None:
        del self.open[sequence_id]
        self.sequences.mark_ended(sequence_id)
        ended = self.channel.take_nowait()
        assert ended == [SequenceEnded(sequence_id)]
        self.send(*ended)

    # ------------------------------------------------------------ what must hold

    def queued(self) -> list[tuple[int, Submit]]:
        return [
            (engine.engine_id, message)
            for engine in self.pool
            for message in engine.queue._items  # noqa: SLF001 - to look without taking
            if isinstance(message, Submit)
        ]

    @invariant()
    def each_is_in_one_place(self) -> None:
        places = [*self.store.unrouted, *self.store.unrouted_resumed]
        places += [m.sequence_id for _, m in self.queued()] + [*self.taken]
        assert sorted(places) == sorted(self.open), "lost, doubled, or kept after its end"

    @invariant()
    def only_to_ready_engines(self) -> None:
        for engine_id, message in self.queued():
            assert engine_id in self.up and engine_id not in self.closing, message

    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        if set(self.up) - self.closing:
            assert not self.store.unrouted and not self.store.unrouted_resumed

    @invariant()
    def choices_stay_together(self) -> None:
        homes: dict[int, set[int]] = {}
        for sequence_id, its in self.store.sequences.items():
            if its.group_id and not self.open[sequence_id].is_resumed:
                homes.setdefault(its.group_id, set()).add(its.engine_id)
        for group_id, engines in homes.items():
            assert len(engines - self.closing) <= 1, group_id

    @invariant()
    def loads_are_of_what_is_there(self) -> None:
        assert set(self.store.sequences) <= set(self.open)
        loads = self.store.routing.loads
        assert (loads.queued >= 0).all() and (loads.blocks >= 0).all() and (loads.running >= 0).all()
        if not self.open:
            assert not self.store.groups and len(self.store.routing.sent) == 0
            in_use = loads.in_use
            assert not np.any(loads.queued[in_use]) and not np.any(loads.blocks[in_use])


Engines.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_engines_come_and_go = Engines.TestCase


def test_resets_reach_every_engine() -> None:
    """A reset also reaches engines that are not ready, which may come back with their caches."""
    machine = Engines()
    machine.come(0)
    machine.send(ResetPrefixCache())
    assert [len(engine.queue) for engine in machine.pool] == [1] * NUM_ENGINES
    machine.die(0)
    assert [len(engine.queue) for engine in machine.pool] == [1] * NUM_ENGINES


def test_resumed_first() -> None:
    """Sequences of an engine that died are sent before those that have waited for an engine."""
    machine = Engines()
    machine.come(0)
    machine.submit_prompt(1, 1)
    machine.take(0)
    machine.die(0)
    machine.submit_prompt(2, 1)
    machine.come(1)
    assert [message.sequence_id for _, message in machine.queued()] == [1, 2]


def test_estimates_are_told() -> None:
    """The accountant gets one estimate for each prompt, not for each choice; it is 0 if no engine has the prefix."""
    machine = Engines()
    machine.come(0)
    machine.submit_prompt(1, 3)
    assert machine.posts.messages == [Routed(1, 0, 0)]
    machine.submit_prompt(1, 1)
    assert machine.posts.messages[1:] == [Routed(4, 0, 16)], "four of five blocks: the last token is computed"


def test_handed_over() -> None:
    """A sequence that a closing engine has ended goes to another, and nothing is kept about its former engine."""
    machine = Engines()
    machine.come(0)
    machine.come(1)
    machine.submit_prompt(1, 1)
    (first,) = [engine_id for engine_id, _ in machine.queued()]
    machine.take(first)
    machine.close(first)
    machine.hand_over()
    assert [(engine_id, message.is_resumed) for engine_id, message in machine.queued()] == [(1 - first, True)]
    machine.teardown()


def test_removed() -> None:
    """If an engine is gone from the pool before the router hears of its end, what was queued for it goes to another."""
    machine = Engines()
    machine.come(0)
    machine.submit_prompt(1, 2)
    machine.come(1)
    machine.pool.remove(0)
    machine.send(EngineDown(0, machine.up.pop(0)))
    assert [(engine_id, message.sequence_id) for engine_id, message in machine.queued()] == [(1, 1), (1, 2)]
    machine.send(EngineUp(0, 1, 100, "same"))
    assert set(machine.store.engines) == {1}


def test_resumed_in_the_order_of_submission() -> None:
    """Resumed sequences are routed before others, the first submitted first, in whatever order they come back."""
    store = RouteStore(Routing(block_size=BLOCK, prefill_budget=64, seed=1))
    store.add([attrs.evolve(submit(number, 1), is_resumed=number < 3) for number in (2, 3, 1)])
    assert [message.sequence_id for message in store.prompts] == [1, 2, 3]
