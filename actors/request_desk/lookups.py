"""Look-ups in the engines' caches that have no answer yet.

The desk asks (`prompt_questions.py`), the router chooses the engine, its link takes the question and delivers the
answer.

    asked ──(a slot)──▶ router ──▶ an engine's queue ──▶ taken (the slot is free) ──▶ answered
                          └─ there is no engine              └─ its engine has gone, in either case: unanswered

What must always hold: every question ends, with an answer, an error, or because its asker has left; at most
`MAX_QUEUED` are on their way to engines.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from ..messages.block_manager import LookUp
from ..messages.handler import Keyed, LookedUp
from ..messages.outcomes import ErrorKind, RequestError

MAX_QUEUED = 64
"""Look-ups that no engine has taken yet, abandoned ones included: each has a whole prompt."""
NO_ENGINE = RequestError(ErrorKind.OVERLOADED, "No engine is ready to look into its cache. Please try again later.")
ENGINE_GONE = RequestError(ErrorKind.OVERLOADED, "The engine that was asked has ended. Please try again.")


@attrs.define(eq=False)
class _Question:
    answered: trio.Event = attrs.field(factory=trio.Event)
    answer: LookedUp | RequestError | None = None
    engine_id: int | None = None

    def put(self, answer: LookedUp | RequestError) -> None:
        self.answer = answer
        self.answered.set()


class Lookups:
    def __init__(self, post: Callable[[LookUp], object]) -> None:
        """`post` sends a question to the router, without waiting."""
        self._post = post
        self._slots = trio.Semaphore(MAX_QUEUED)
        self._waiting: dict[int, _Question] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, keyed: Keyed, affinity: bytes, *, prefetch: bool = False) -> LookedUp | RequestError:
        """Ask the engine that a sequence with this prompt would be sent to."""
        await self._slots.acquire()
        number, question = self._next_number, _Question()
        self._next_number += 1
        self._waiting[number] = question
        self._post(
            LookUp(number, keyed.token_ids, keyed.root_key, keyed.block_keys, keyed.reads_cache, affinity, prefetch)
        )
        try:
            await question.answered.wait()
        finally:
            del self._waiting[number]
        assert question.answer is not None
        return question.answer

    def take(self, message: LookUp, engine_id: int) -> bool:
        """Note that an engine's link has taken a question; return whether anybody waits for its answer."""
        self._slots.release()
        question = self._waiting.get(message.number)
        if question is None:
            return False
        question.engine_id = engine_id
        return True

    def refuse(self, message: LookUp) -> None:
        """Note that no engine can be asked."""
        self._slots.release()
        if (question := self._waiting.get(message.number)) is not None:
            question.put(NO_ENGINE)

    def answer(self, looked_up: LookedUp, engine_id: int) -> None:
        """Pass on what an engine has said, unless nobody waits for it."""
        if (question := self._waiting.get(looked_up.number)) is not None:
            question.put(attrs.evolve(looked_up, engine_id=engine_id))

    def on_engine_gone(self, engine_id: int) -> None:
        """Note that an engine will not answer what it has taken."""
        for question in self._waiting.values():
            if question.engine_id == engine_id and question.answer is None:
                question.put(ENGINE_GONE)
