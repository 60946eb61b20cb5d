"""Sequences wait for their grammar outside the scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import attrs
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.grammars.grammar_gate import GrammarGate
from quipu.actors.messages.sampling import OutputGrammar, SamplingParams
from quipu.actors.messages.scheduler import Abort, ResetPrefixCache, Submit


@attrs.define
class Gate:
    """A gate whose grammars finish compiling when a test says so."""

    inbox: Channel[Any] = attrs.field(factory=lambda: Channel(100))
    compiling: dict[str, Future[None]] = attrs.field(factory=dict)
    num_prepared: int = 0
    gate: GrammarGate = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.gate = GrammarGate(self._prepare, self.inbox)

    def _prepare(self, grammar: OutputGrammar) -> Future[Any]:
        self.num_prepared += 1
        return self.compiling.setdefault(grammar.text, Future())

    async def send(self, *messages: Submit | Abort | ResetPrefixCache) -> None:
        for message in messages:
            await self.gate.send(message)

    async def compiled(self, text: str) -> None:
        """Finish a grammar, as its thread does."""
        await trio.to_thread.run_sync(self.compiling[text].set_result, None)
        await trio.testing.wait_all_tasks_blocked()


def submit(sequence_id: int, grammar: str | None = None) -> Submit:
    sampling = SamplingParams(max_tokens=1, grammar=None if grammar is None else OutputGrammar(grammar))
    return Submit(sequence_id, [1, 2], b"r", [], sampling)


async def test_only_those_wait_whose_grammar_is_compiling() -> None:
    """A sequence waits only for its own grammar; one whose grammar is compiled does not wait."""
    gate = Gate()
    slow, quick, plain, again = submit(1, "slow"), submit(2, "quick"), submit(3), submit(4, "quick")
    await gate.send(slow, quick, plain, ResetPrefixCache())
    assert gate.inbox.take_nowait() == [plain, ResetPrefixCache()]
    await gate.compiled("quick")
    assert gate.inbox.take_nowait() == [quick]
    await gate.send(again)
    assert gate.inbox.take_nowait() == [again]
    await gate.compiled("slow")
    assert gate.inbox.take_nowait() == [slow]


async def test_order_is_kept() -> None:
    """Sequences of one grammar keep their order, and an abort comes after the sequence that it ends."""
    gate = Gate()
    messages = [submit(1, "a"), submit(2, "a"), Abort(1), submit(3, "a"), Abort(3, ends_group=True)]
    assert gate.num_prepared == 0
    await gate.send(*messages, Abort(7))
    assert gate.inbox.take_nowait() == [Abort(7)]
    await gate.compiled("a")
    assert gate.inbox.take_nowait() == messages
    await gate.send(Abort(2))
    assert gate.inbox.take_nowait() == [Abort(2)]
    assert gate.num_prepared == 3


async def test_sequences_that_nobody_wants() -> None:
    """Sequences are passed on once all that wait for their grammar are aborted, and later ones wait for it anew."""
    gate = Gate()
    first, second, third = submit(1, "a"), submit(2, "a"), submit(3, "a")
    await gate.send(first, second, Abort(1))
    assert gate.inbox.take_nowait() == []
    await gate.send(Abort(2), Abort(1, ends_group=True))
    assert gate.inbox.take_nowait() == [first, second, Abort(1), Abort(2), Abort(1, ends_group=True)]
    await gate.send(third)
    assert gate.inbox.take_nowait() == []
    await gate.compiled("a")
    assert gate.inbox.take_nowait() == [third]


async def test_grammar_that_is_compiled_anew() -> None:
    """Sequences that wait when their grammar is given up, and begun again for later ones, wait with those."""
    gate = Gate()
    await gate.send(first := submit(1, "a"))
    given_up = gate.compiling.pop("a")
    await gate.send(second := submit(2, "a"))
    given_up.set_result(None)
    await trio.testing.wait_all_tasks_blocked()
    assert gate.inbox.take_nowait() == []
    await gate.compiled("a")
    assert gate.inbox.take_nowait() == [first, second]


async def test_grammar_that_cannot_be_compiled_is_passed_on() -> None:
    """A sequence whose grammar fails to compile is passed on, so that the executor fails it with a reason."""
    gate = Gate()
    await gate.send(message := submit(1, "broken"))
    await trio.to_thread.run_sync(gate.compiling["broken"].set_exception, ValueError("broken"))
    await trio.testing.wait_all_tasks_blocked()
    assert gate.inbox.take_nowait() == [message]


def test_loop_that_has_ended() -> None:
    """A grammar that is compiled after the engine's loop has ended is no error."""
    gate = Gate()
    trio.run(gate.send, submit(1, "late"))
    gate.compiling["late"].set_result(None)
    assert gate.inbox.take_nowait() == []
