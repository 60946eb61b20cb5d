"""Engines with roles come, go and change them: each sequence is in one place, and what is fetched ahead ends."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.peers import EndFetch, Fetch, Peer
from quipu.actors.messages.router import EngineClosing, EngineDown, EngineUp, RoleChanged
from quipu.actors.messages.scheduler import Abort, SequenceKind, Submit
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.open_requests import OpenRequest
from tests.actors.router.test_dispatch import NO_DESK, NUM_ENGINES, Engines, Taken, submit

PREFILL, DECODE, MIXED = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.MIXED
READY = EngineReady(0, 100, 4, "fake", "float32", numerics="same")


def address_of(engine_id: int) -> str:
    return f"/peers/{engine_id}"


class EnginesApart(Engines):
    """Sequences go through `LiveSequences` as they do in a server: taken, left after their prompt, taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.fetching: dict[int, set[int]] = {engine.engine_id: set() for engine in self.pool}
        """By engine, the sequences in whose names it fetches."""
        self.fetched: list[Fetch] = []
        for engine in self.pool:
            engine.role = (PREFILL, DECODE, DECODE)[engine.engine_id]

    # ------------------------------------------------------------ what happens

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def come(self, engine_id: int) -> None:
        if engine_id not in self.up and engine_id not in self.closing:
            engine = self.pool[engine_id]
            engine.ready = attrs.evolve(READY, peer_address=address_of(engine_id))
            self.up[engine_id] = self.pool.next_incarnation()
            self.send(EngineUp(engine_id, self.up[engine_id], 100, "same", engine.role, address_of(engine_id)))

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1), role=st.sampled_from(EngineRole))
    def change_role(self, engine_id: int, role: EngineRole) -> None:
        self.pool[engine_id].role = role
        self.send(RoleChanged(engine_id, role))

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def take(self, engine_id: int) -> None:
        if engine_id not in self.up or not len(self.pool[engine_id].queue):
            return
        for message in trio.run(self.sequences.take_for, self.pool[engine_id], self.up[engine_id]):
            match message:
                case Submit(sequence_id):
                    assert sequence_id not in self.taken and sequence_id in self.open
                    assert message.peer is None or message.peer.engine_id != engine_id, "it has them itself"
                    self.fetching[engine_id].discard(sequence_id)
                    self.taken[sequence_id] = Taken(message, engine_id)
                case Fetch(sequence_id):
                    assert sequence_id not in self.fetching[engine_id]
                    assert message.peer.engine_id != engine_id
                    self.fetching[engine_id].add(sequence_id)
                    self.fetched.append(message)
                case EndFetch(sequence_id):
                    assert sequence_id in self.fetching[engine_id], "nothing is fetched for it"
                    self.fetching[engine_id].remove(sequence_id)
                case Abort(sequence_id, ends_group=False):
                    if (its := self.taken.get(sequence_id)) is not None:
                        assert its.engine_id == engine_id
                        its.is_aborted = True

    @precondition(lambda self: any(its.submit.ends_after_prefill for its in self.taken.values()))
    @rule(data=st.data())
    def complete_prompt(self, data: st.DataObject) -> None:
        """Have an engine end a sequence with its first token."""
        leaving = [i for i, its in self.taken.items() if its.submit.ends_after_prefill]
        self.leave(data.draw(st.sampled_from(leaving)))

    def leave(self, sequence_id: int) -> None:
        its = self.taken.pop(sequence_id)
        self.sequences.note_tokens([sequence_id], [7])
        if self.sequences.resume_elsewhere(sequence_id):
            self.send(*self.channel.take_nowait())
        else:
            assert its.is_aborted or self.sequences._live[sequence_id].aborted  # noqa: SLF001
            self.end(sequence_id)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def draw_token(self, data: st.DataObject) -> None:
        """Report a token of a sequence whose engine then may die."""
        self.sequences.note_tokens([data.draw(st.sampled_from(sorted(self.taken)))], [8])

    @rule(engine_id=st.integers(0, NUM_ENGINES - 1))
    def die(self, engine_id: int) -> None:
        incarnation = self.up.pop(engine_id, None)
        if incarnation is None:
            return
        self.send(EngineDown(engine_id, incarnation))
        self.fetching[engine_id].clear()
        held = {i for i, its in self.taken.items() if its.engine_id == engine_id}
        self.taken = {i: its for i, its in self.taken.items() if i not in held}
        back = self.sequences.take_back(incarnation, dict.fromkeys(sorted(held), 0), (), is_last=False)
        self.send(*self.channel.take_nowait())
        for sequence_id in (*back.ended, *back.failed, *back.culprits):
            self.end(sequence_id)

    @precondition(lambda self: self.closing & {its.engine_id for its in self.taken.values()})
    @rule(with_blocks=st.booleans())
    def hand_over(self, with_blocks: bool = True) -> None:
        for engine_id in self.closing & set(self.up):
            held = [i for i, its in self.taken.items() if its.engine_id == engine_id]
            self.sequences.hand_over(self.pool[engine_id], held, with_blocks=with_blocks)
            for sequence_id in held:
                del self.taken[sequence_id]
                if self.sequences.resume_elsewhere(sequence_id):
                    self.send(*self.channel.take_nowait())
                else:
                    self.end(sequence_id)
            self.pool[engine_id].queue.take_nowait()  # the aborts of what it has ended

    def teardown(self) -> None:
        for engine_id in list(self.up):
            self.die(engine_id)
        self.closing.clear()
        for sequence_id in list(self.sequences._waiting):  # noqa: SLF001 - a search for the cause of the deaths
            self.sequences.abort(sequence_id)
        self.come(0)
        self.come(1)
        while self.open:
            for engine_id in (0, 1):
                self.take(engine_id)
            for sequence_id in list(self.taken):
                if self.taken[sequence_id].submit.ends_after_prefill:
                    self.leave(sequence_id)
                else:
                    del self.taken[sequence_id]
                    self.end(sequence_id)
        for engine_id in (0, 1):
            self.take(engine_id)
        self.loads_are_of_what_is_there()
        assert (self.open, self.store.unrouted, self.store.sequences, self.store.pairs) == ({}, {}, {}, {})
        assert not any(self.fetching.values()), "nothing that was fetched ahead may be left"

    # ------------------------------------------------------------ what must hold

    @invariant()
    def each_is_in_one_place(self) -> None:
        places = [*self.store.unrouted, *self.store.unrouted_resumed, *self.sequences._waiting]  # noqa: SLF001
        places += [m.sequence_id for _, m in self.queued()] + [*self.taken]
        assert sorted(places) == sorted(self.open), "lost, doubled, or kept after its end"

    @invariant()
    def pairs_are_usable(self) -> None:
        assert set(self.store.pairs) <= set(self.open)
        for sequence_id, pair in self.store.pairs.items():
            engine = self.store.engines[pair.decode_id]
            assert not engine.is_closing and engine.role.may_decode and sequence_id in pair.routes

    @invariant()
    def nothing_runs_where_nothing_is(self) -> None:
        if not self.open:
            loads = self.store.routing.loads
            assert not np.any(loads.running[loads.in_use])


EnginesApart.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_engines_with_roles_come_and_go = EnginesApart.TestCase


def apart(*roles: EngineRole) -> EnginesApart:
    """Return a machine whose first engines are ready, with these roles."""
    machine = EnginesApart()
    for engine_id, role in enumerate(roles):
        machine.pool[engine_id].role = role
        machine.come(engine_id)
    return machine


def where(machine: EnginesApart) -> list[tuple[int, int, bool]]:
    """Return (engine, sequence, whether it ends after its prompt) of what is queued."""
    return [(engine_id, message.sequence_id, message.ends_after_prefill) for engine_id, message in machine.queued()]


def continue_of(machine: EnginesApart, sequence_id: int) -> tuple[int, Peer | None]:
    """Complete a prompt, and return where its sequence continues, and from where its blocks may be fetched."""
    machine.leave(sequence_id)
    ((engine_id, message),) = [(at, its) for at, its in machine.queued() if its.sequence_id == sequence_id]
    assert message.output_token_ids == [7] and message.is_resumed and not message.ends_after_prefill
    return engine_id, message.peer


def test_prompt_goes_through_both() -> None:
    """A prompt is computed by an engine for prefill, which another one fetches meanwhile and then continues."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 1)
    assert where(machine) == [(0, 1, True)]
    machine.take(0)
    machine.take(1)
    (fetch,) = machine.fetched
    assert (fetch.sequence_id, fetch.peer) == (1, Peer(0, address_of(0)))
    assert (fetch.prompt_token_ids, fetch.block_keys) == (list(range(20)), machine.open[1].block_keys)
    assert continue_of(machine, 1) == (1, Peer(0, address_of(0)))
    machine.take(1)
    assert machine.fetching[1] == set(), "its arrival ends that"
    machine.teardown()


def test_load_is_noted_on_both() -> None:
    """Blocks are kept for a sequence where it continues from when its prompt is sent, and until it ends."""
    machine = apart(PREFILL, DECODE)
    loads = machine.store.routing.loads
    machine.submit_prompt(1, 1)
    slots = [machine.store.engines[engine_id].slot for engine_id in (0, 1)]
    assert loads.blocks[slots].tolist() == [5, 5] and loads.running[slots].tolist() == [0, 1]
    machine.take(0)
    machine.leave(1)
    assert loads.blocks[slots].tolist() == [0, 5] and loads.running[slots].tolist() == [0, 1]
    machine.take(1)
    del machine.taken[1]
    machine.end(1)
    assert loads.blocks[slots].tolist() == [0, 0] and loads.running[slots].tolist() == [0, 0]


def test_choices_keep_one_pair() -> None:
    """The choices of a prompt are computed by one engine, fetched once, and continue on one engine."""
    machine = apart(PREFILL, DECODE, DECODE)
    machine.submit_prompt(1, 3)
    assert where(machine) == [(0, 1, True), (0, 2, True), (0, 3, True)]
    for engine_id in range(3):
        machine.take(engine_id)
    assert [fetch.sequence_id for fetch in machine.fetched] == [1]
    homes = {continue_of(machine, sequence_id)[0] for sequence_id in (2, 3, 1)}
    assert len(homes) == 1
    machine.teardown()


def test_fetch_outlives_the_choice_that_it_names() -> None:
    """If the first choice ends early, what is fetched goes on for the others, and ends when the last has arrived."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 2)
    machine.take(0)
    machine.take(1)
    machine.sequences.abort(1)
    machine.send(*machine.channel.take_nowait())
    machine.take(0)
    machine.leave(1)
    assert machine.pool[1].queue.take_nowait() == []
    machine.leave(2)
    ended, arrived = machine.pool[1].queue.take_nowait()
    assert isinstance(arrived, Submit) and ended == EndFetch(1)


@pytest.mark.parametrize("is_taken", [False, True])
def test_aborted_before_it_arrived(is_taken: bool) -> None:
    """The end of a sequence whose prompt is still computed ends what is fetched for it."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(1)
    if is_taken:
        machine.take(0)
    machine.sequences.abort(1)
    machine.send(*machine.channel.take_nowait())
    machine.take(0)
    machine.leave(1)
    assert machine.pool[1].queue.take_nowait() == [EndFetch(1)]
    machine.fetching[1].clear()
    machine.teardown()


def test_without_an_address_nothing_is_fetched() -> None:
    """An engine whose blocks cannot be fetched computes prompts all the same, and nobody is told to fetch them."""
    machine = EnginesApart()
    machine.up = {0: machine.pool.next_incarnation(), 1: machine.pool.next_incarnation()}
    for engine_id in (0, 1):
        machine.pool[engine_id].ready = READY
        machine.send(EngineUp(engine_id, machine.up[engine_id], 100, "same", machine.pool[engine_id].role))
    machine.submit_prompt(1, 1)
    assert where(machine) == [(0, 1, True)] and not len(machine.pool[1].queue)
    machine.take(0)
    assert continue_of(machine, 1) == (1, None)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([PREFILL], [(0, 1, False)]),
        ([DECODE], [(0, 1, False)]),
        ([PREFILL, PREFILL], [(0, 1, False)]),
        ([MIXED, MIXED], [(0, 1, False)]),
        ([DECODE, MIXED], [(1, 1, True)]),
        ([DECODE, PREFILL], [(1, 1, True)]),
    ],
)
def test_one_side_alone(roles: list[EngineRole], expected: list[tuple[int, int, bool]]) -> None:
    """Where one side has no engine, a prompt stays on the engine that computes it; a mixed engine is on both sides."""
    machine = apart(*roles)
    machine.submit_prompt(1, 1)
    assert where(machine) == expected
    machine.teardown()


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": attrs.evolve(submit(1, 1).sampling, max_tokens=1)},
        {"sampling": attrs.evolve(submit(1, 1).sampling, max_tokens=0)},
        {"kind": SequenceKind.EMBED},
    ],
)
def test_nothing_to_continue(changes: dict[str, Any]) -> None:
    """A sequence that ends with its prompt is not handed over, and nothing is fetched for it."""
    machine = apart(PREFILL, DECODE)
    machine.open[1] = attrs.evolve(submit(1, 1), **changes)
    machine.sequences.put(machine.open[1], OpenRequest("r1", NO_DESK, None))
    machine.send(*machine.channel.take_nowait())
    assert where(machine) == [(0, 1, False)] and not len(machine.pool[1].queue)


def test_decode_engine_dies() -> None:
    """If the engine dies that was to continue a sequence, another one does, and may fetch the blocks."""
    machine = apart(PREFILL, DECODE, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(0)
    (pair,) = machine.store.pairs.values()
    machine.die(pair.decode_id)
    assert not machine.store.pairs
    assert continue_of(machine, 1) == (3 - pair.decode_id, Peer(0, address_of(0)))
    machine.teardown()


def test_prefill_engine_dies_after_the_first_token() -> None:
    """A sequence whose prompt was computed continues where its blocks were fetched to, and fetches no more."""
    machine = apart(PREFILL, DECODE, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(0)
    (pair,) = machine.store.pairs.values()
    machine.sequences.note_tokens([1], [7])
    machine.die(0)
    ((engine_id, message),) = machine.queued()
    assert (engine_id, message.peer, message.ends_after_prefill) == (pair.decode_id, None, False)
    machine.teardown()


def test_prefill_engine_dies_before_the_first_token() -> None:
    """A sequence without a token is sent like a new one, and what was fetched for it before ends."""
    machine = apart(PREFILL, DECODE, PREFILL)
    machine.submit_prompt(1, 1)
    ((first, _),) = machine.queued()
    machine.take(first)
    machine.take(1)
    machine.die(first)
    assert where(machine) == [(2 - first, 1, True)]
    ended, fetch = machine.pool[1].queue.take_nowait()
    assert ended == EndFetch(1) and isinstance(fetch, Fetch) and fetch.peer.engine_id == 2 - first


def test_former_engine_has_restarted() -> None:
    """Blocks are not fetched from an engine that was restarted since: it does not have them."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(0)
    machine.die(1)
    machine.change_role(0, MIXED)
    machine.closing.add(0)
    machine.send(EngineClosing(0))
    machine.sequences.note_tokens([1], [7])
    machine.sequences.hand_over(machine.pool[0], [1], with_blocks=True)
    del machine.taken[1]
    assert machine.sequences.resume_elsewhere(1)
    machine.send(*machine.channel.take_nowait())
    assert list(machine.store.unrouted_resumed) == [1], "no engine may have it"
    machine.send(EngineDown(0, machine.up.pop(0)))
    machine.closing.clear()
    machine.come(0)
    machine.come(1)
    ((_, message),) = machine.queued()
    assert message.peer is None


def test_moved_with_its_blocks() -> None:
    """What a closing engine hands over with its blocks names it, so that the next one can fetch them."""
    machine = apart(MIXED, MIXED)
    machine.submit_prompt(1, 1)
    ((first, _),) = machine.queued()
    machine.take(first)
    machine.close(first)
    machine.hand_over(with_blocks=True)
    ((engine_id, message),) = machine.queued()
    assert (engine_id, message.peer) == (1 - first, Peer(first, address_of(first)))
    assert message.is_resumed and not message.ends_after_prefill
    machine.teardown()


def test_role_changes_while_a_prompt_is_computed() -> None:
    """A sequence does not go to an engine that no longer continues any; without any that does, it stays."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(0)
    machine.take(1)
    machine.change_role(1, PREFILL)
    assert machine.pool[1].queue.take_nowait() == [EndFetch(1)]
    machine.fetching[1].clear()
    machine.leave(1)
    ((_, message),) = machine.queued()
    assert not message.ends_after_prefill
    machine.teardown()


def test_prompt_that_kills_the_router() -> None:
    """It is sent to an engine in the simplest way, without a pair; its sequence is continued likewise."""
    machine = apart(PREFILL, DECODE)
    machine.sequences.put(submit(1, 1), OpenRequest("r1", NO_DESK, None))
    machine.open[1] = submit(1, 1)
    machine.store.add(machine.channel.take_nowait())
    for _ in range(2):
        assert machine.store.record_death() == 1
    machine.send()
    assert where(machine) == [(0, 1, False)] and not machine.store.pairs
    machine.teardown()


def test_look_up_asks_who_would_compute_the_prompt() -> None:
    """What a prompt would find in the cache is asked of the engine that it would be sent to."""
    machine = apart(DECODE, PREFILL)
    prompt = submit(1, 1)
    question = LookUp(1, prompt.prompt_token_ids, b"", prompt.block_keys)
    machine.send(question)
    assert machine.pool[1].queue.take_nowait() == [question]
    slot = machine.store.engines[0].slot
    machine.store.routing.on_stored(slot, [key[:8] for key in prompt.block_keys])
    machine.send(question)
    assert machine.pool[0].queue.take_nowait() == [question], "it has all of it"


def test_closing_engine_keeps_what_it_was_told() -> None:
    """An engine that closes is sent no sequence, and told to end what it fetches; what it was to fetch is dropped."""
    machine = apart(PREFILL, DECODE)
    machine.submit_prompt(1, 1)
    machine.take(1)
    machine.submit_prompt(2, 1)
    machine.close(1)
    machine.take(1)
    assert machine.fetching[1] == set() and [fetch.sequence_id for fetch in machine.fetched] == [1]
    machine.teardown()
