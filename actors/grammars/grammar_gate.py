"""Holds sequences back until the engine has compiled their grammar, so that no step of others waits for it.

`engine.py` puts it in front of the scheduler's inbox. What must always hold: messages about one sequence, and sequences
with the same grammar, keep their order; a sequence is held no longer than its grammar takes, or anybody wants it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import attrs
import trio

from ..channel import Poster, Sender
from ..messages.sampling import OutputGrammar
from ..messages.scheduler import Abort, ResetPrefixCache, Submit

Prepare = Callable[[OutputGrammar], Future[Any]]
"""Begins to compile a grammar, unless that is done, and returns a future for it."""

Key = tuple[str, str]
"""A grammar's owner and text."""

WebMessage = Submit | Abort | ResetPrefixCache


class Inbox(Sender[WebMessage], Poster[WebMessage], Protocol): ...


@attrs.define(eq=False)
class _Held:
    """What waits for one grammar."""

    key: Key
    compiled: Future[Any] | None = None
    messages: list[WebMessage] = attrs.field(factory=list)
    """In order."""
    wanted: set[int] = attrs.field(factory=set)
    """Sequences among them that are not aborted."""


@attrs.frozen(eq=False)
class GrammarGate:
    _prepare: Prepare
    _inbox: Inbox
    _held: dict[Key, _Held] = attrs.field(factory=dict)
    _by_sequence: dict[int, _Held] = attrs.field(factory=dict)

    async def send(self, message: WebMessage) -> None:
        """Pass a message on to the scheduler, or hold it until its grammar is compiled."""
        if not self._holds(message):
            await self._inbox.send(message)

    def _holds(self, message: WebMessage) -> bool:
        match message:
            case Submit() if (grammar := message.sampling.grammar) is not None:
                return self._holds_sequence(message, grammar)
            case Abort() if (held := self._by_sequence.get(message.sequence_id)) is not None:
                held.messages.append(message)
                held.wanted.discard(message.sequence_id)
                if not held.wanted:  # together they end in the scheduler, before a step could need the grammar
                    self._release(held)
                return True
        return False

    def _holds_sequence(self, submit: Submit, grammar: OutputGrammar) -> bool:
        compiled = self._prepare(grammar)  # for each: it is given up once nobody is left that waits for it
        key = grammar.owner, grammar.text
        held = self._held.get(key)
        if held is None:
            if compiled.done():
                return False
            held = self._held[key] = _Held(key)
        if held.compiled is not compiled:
            held.compiled = compiled
            release = partial(self._release_compiled, held, compiled)
            compiled.add_done_callback(partial(_call_in_loop, trio.lowlevel.current_trio_token(), release))
        held.messages.append(submit)
        held.wanted.add(submit.sequence_id)
        self._by_sequence[submit.sequence_id] = held
        return True

    def _release_compiled(self, held: _Held, compiled: Future[Any]) -> None:
        if held.compiled is compiled:
            self._release(held)

    def _release(self, held: _Held) -> None:
        for message in held.messages:
            if isinstance(message, Submit):
                del self._by_sequence[message.sequence_id]
            # `post` and not `send`: this is not a task; the web side limits the number of sequences
            self._inbox.post(message)
        held.messages.clear()
        if self._held.get(held.key) is held:
            del self._held[held.key]


def _call_in_loop(token: trio.lowlevel.TrioToken, function: Callable[[], None], _: Future[Any]) -> None:
    """Run `function` in the loop, unless the loop has ended. Called in the compiling thread."""
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(function)
