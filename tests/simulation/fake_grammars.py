"""Grammars of a simulation: a rule for the next token that needs no library and no process.

A grammar is a number, whether the model is to reason first, and a script that comes then, as that of a forced call.
Which tokens may come next depends on the number, on how many there are, and on the last one, so that an engine that has
lost or repeated a token masks others. `Checks` stands for the web process's pool of grammar processes, `Masks` for an
engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import trio

from tests.simulation.arrival import ANY_LETTER, FIRST_ID, NUM_IDS

VOCABULARY = 4096
CHECK_S = 0.004
LETTERS = range(67, 93)
"""The ids of a to z in the tiny model's vocabulary."""


def allowed(grammar: int, script: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the tokens that may follow an answer."""
    last, ids = answer[-1] if answer else 0, range(FIRST_ID, FIRST_ID + NUM_IDS)
    if len(answer) < len(script):
        if (wanted := script[len(answer)]) != ANY_LETTER:
            return [wanted]
        ids = LETTERS
    return [i for i in ids if (i * grammar + last + len(answer)) % 3]


def next_token(grammar: int, script: Sequence[int], answer: Sequence[int], drawn: int) -> int:
    """Return what follows an answer where `drawn` would without a grammar."""
    ids = allowed(grammar, script, answer)
    return drawn if drawn in ids else ids[drawn % len(ids)]


def in_reasoning(closing: Collection[int], ends: Collection[int]) -> list[int]:
    """Return the tokens that may come in reasoning, which `closing` ends: those that end an output may not."""
    return sorted({*range(FIRST_ID, FIRST_ID + NUM_IDS), *closing} - set(ends))


@lru_cache
def _read(text: str) -> tuple[int, bool, tuple[int, ...]]:
    """Return the number and the script of a grammar that was written by `Arrival.grammar_text`, and if it reasons."""
    number, reasons, script = text.split(":")
    return int(number), reasons == "1", tuple(map(int, script.split(","))) if script else ()


@attrs.define(eq=False)
class MaskFaults:
    """Shared by the engines of a run."""

    num_to_lose: int = 0
    """So many of the next masks cannot be computed, since their process has ended."""


@attrs.define(eq=False)
class Masks:
    """Implements the executor's `MaskMaker`."""

    faults: MaskFaults
    lost: str
    """Why a mask is lost, in the server's words."""
    closing: Collection[int] = ()
    """The tokens that end reasoning..."""
    ends: Collection[int] = ()
    """...and those that end an output."""

    def prepare(self, grammar: Any) -> Future[Any]:
        is_ready: Future[Any] = Future()
        is_ready.set_result(None)
        return is_ready

    def begin(self, grammars: list[Any], drafts: Sequence[Sequence[int]] = ()) -> Callable[[], Sequence[Any]]:
        masks: list[Any] = []
        for grammar, draft in zip(grammars, drafts or [()] * len(grammars), strict=True):
            masks += [self._mask(grammar, [*grammar.answer, *draft[:num]]) for num in range(len(draft) + 1)]
        return lambda: masks

    def _mask(self, grammar: Any, answer: list[int]) -> Any:
        if self.faults.num_to_lose:
            self.faults.num_to_lose -= 1
            return self.lost
        number, reasons, script = _read(grammar.text)
        if grammar.is_reasoning:
            ids = in_reasoning(self.closing, self.ends)
        elif reasons and grammar.next_opening_id is not None:
            ids = [grammar.next_opening_id]
        else:
            ids = allowed(number, script, answer)
        bits = np.zeros(VOCABULARY, np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class Checks:
    """Implements the tokenizer's `GrammarChecks`: a grammar is known once it was checked."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()

    def known(self, spec: Any, options: Any) -> str | None:
        return spec.source if spec.source in self._known else None

    async def check(self, spec: Any, options: Any) -> str:
        await trio.sleep(CHECK_S)
        self._known.add(spec.source)
        return str(spec.source)
