"""Holds sequences back until the engine has compiled their grammar, so that no step of others waits for it.

`engine.py` puts it in front of the scheduler's inbox. What must always hold: messages about one sequence, and sequences
with the same grammar, keep their order; a sequence is held no longer than its grammar takes.
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


@attrs.frozen(eq=False)
class GrammarGate:
    _prepare: Prepare
    _inbox: Inbox
    _held: dict[Key, list[WebMessage]] = attrs.field(factory=dict)
    """By grammar, in order."""

    async def send(self, message: WebMessage) -> None:
        """Pass a message on to the scheduler, or hold it until its grammar is compiled."""
        if (held := self._behind(message)) is not None:
            held.append(message)
            return
        if isinstance(message, Submit) and (grammar := message.sampling.grammar) is not None:
            compiled = self._prepare(grammar)
            if not compiled.done():
                self._held[_key(grammar)] = [message]
                release = partial(self._release, _key(grammar))
                compiled.add_done_callback(partial(_call_in_loop, trio.lowlevel.current_trio_token(), release))
                return
        await self._inbox.send(message)

    def _behind(self, message: WebMessage) -> list[WebMessage] | None:
        match message:
            case Submit():
                grammar = message.sampling.grammar
                return None if grammar is None else self._held.get(_key(grammar))
            case Abort():
                for held in self._held.values():
                    if any(isinstance(one, Submit) and one.sequence_id == message.sequence_id for one in held):
                        return held
        return None

    def _release(self, key: Key) -> None:
        # `post` and not `send`: this is not a task; the web side limits the number of sequences
        for message in self._held.pop(key):
            self._inbox.post(message)


def _key(grammar: OutputGrammar) -> Key:
    return grammar.owner, grammar.text


def _call_in_loop(token: trio.lowlevel.TrioToken, function: Callable[[], None], _: Future[Any]) -> None:
    """Run `function` in the loop, unless the loop has ended. Called in the compiling thread."""
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(function)
