"""Which tokens the sequences of a step may draw, for those whose output has to match a grammar.

The executor keeps a `SequenceGrammar` for each such sequence and tells it every drawn token. `GrammarMasks` computes
the masks of a step in a thread of its own, with the GIL released, while the backend runs the forward pass.

    prompt opened reasoning:          reasoning ... closing ids, white space?, answer
    prompt opened and closed it:      answer
    otherwise:                        opening ids, then as in the first line; or the answer at once

What must always hold: a mask depends on the grammar and on the sequence's outputs alone, so that it is the same after a
preemption; a sequence whose grammar fails says why, and no other does; only the thread of `GrammarMasks` uses matchers;
masks that take too long end their own sequence: one mask by the library's limits, many by `MAX_DEBT_S`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np

from quipu.kernels.reasoning_budget import Finder

from ..messages.sampling import OutputGrammar
from ..shared.grammar_library import (
    MAX_MASK_S,
    GrammarError,
    GrammarLibrary,
    GrammarTooComplex,
    Matcher,
    Words,
    regex_grammar,
)

MAX_COMPILED = 64
"""Grammars kept for later sequences."""
MAX_GAP = 2
"""Tokens of white space that may stand between reasoning and answer, each of up to eight characters."""
MAX_DEBT_S = 0.1
"""By how much the masks of a sequence may exceed `MAX_MASK_S` for each of its tokens, before it fails."""
MAX_COUNTED_S = 0.040
"""What is counted of the processor time of one mask, for each of its tokens.

The library's limits keep nearly every grammar's below it. More may not be the grammar's: a collection of garbage began
in this thread, or the host did not run this virtual machine. One that does take longer fails after four masks.
"""
_WHITE_SPACE = regex_grammar(r"[ \n\r\t]{1,8}")

Mask = bytes | str
"""A mask, or why there is none."""


class SequenceGrammar:
    """One sequence's grammar, and which of its outputs belong to the answer."""

    def __init__(self, grammar: OutputGrammar, output_token_ids: Sequence[int], *, ends_early: bool) -> None:
        """`output_token_ids` are those drawn so far. `ends_early`: whether it may end where it could also go on."""
        self.text = grammar.text
        self.ends_early = ends_early
        self.answer: list[int] = []
        """Outputs from where the answer may begin."""
        self.gap = 0
        """How many tokens of white space may precede the answer."""
        self._opening = grammar.reasoning_opening_ids
        self._closing = Finder(grammar.reasoning_closing_ids) if grammar.prompt_opens_reasoning else None
        self._may_open = bool(self._opening) and self._closing is None
        self._closing_ids = grammar.reasoning_closing_ids
        self.matcher: Matcher | None = None
        self.num_followed = 0
        """Tokens of the answer that the matcher or the gap has taken."""
        self.has_begun = False
        self.debt_s = 0.0
        """Processor time of its masks beyond `MAX_MASK_S` for each token; none is saved up for later ones."""
        for token_id in output_token_ids:
            self.add_output(token_id)

    def add_output(self, token_id: int) -> None:
        """Record a drawn token."""
        if self._closing is not None:
            if self._closing.add(token_id):
                self._closing, self.gap = None, MAX_GAP
            return
        self.answer.append(token_id)
        if self._may_open and tuple(self.answer) == self._opening:
            self._closing, self._may_open = Finder(self._closing_ids), False
            self.answer, self.matcher, self.num_followed, self.has_begun = [], None, 0, False
        elif self._may_open and tuple(self.answer) != self._opening[: len(self.answer)]:
            self._may_open = False

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning is open: any token may be drawn but those that would end the output before its answer."""
        return self._closing is not None

    @property
    def next_opening_id(self) -> int | None:
        """The token with which the model may begin, or go on, to open reasoning."""
        return self._opening[len(self.answer)] if self._may_open else None


class MaskMaker(Protocol):
    """What the executor needs of `GrammarMasks`."""

    def prepare(self, text: str) -> Future[Any]: ...

    def begin(self, grammars: list[SequenceGrammar]) -> Callable[[], Sequence[Mask]]: ...


class NoMasks:
    """Stands for `GrammarMasks` in an engine without a tokenizer."""

    def prepare(self, text: str) -> Future[Any]:
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def begin(self, grammars: list[SequenceGrammar]) -> Callable[[], Sequence[Mask]]:
        return lambda: ["This engine has no tokenizer to follow a grammar with."] * len(grammars)


class GrammarMasks:
    """Compiles the grammars of one engine, and computes masks."""

    def __init__(
        self, library: GrammarLibrary, eos_token_ids: tuple[int, ...], clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock`: seconds of processor time of the thread that calls it."""
        self._clock = clock
        self._library = library
        self._eos = library.end_mask
        self._any_but_end = (~library.end_mask).tobytes()
        self._can_end = bool(eos_token_ids)
        self._white_space: Words | None = None
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        for pool in (self._masks, self._compiling):
            pool.submit(bool)  # has it start its thread now: later there may be no memory for one

    def prepare(self, text: str) -> Future[Matcher]:
        """Begin to compile a grammar, unless it is known. May be called from any thread."""
        with self._lock:
            future = self._compiled.get(text)
            if future is None:
                future = self._compiled[text] = self._compiling.submit(self._compile, text)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(text)
            return future

    def begin(self, grammars: list[SequenceGrammar]) -> Callable[[], Sequence[Mask]]:
        """Begin to compute the masks of the next tokens of these sequences. The result waits for them."""
        work = [(grammar, self.prepare(grammar.text)) for grammar in grammars]
        return self._masks.submit(partial(self._compute, work)).result

    # ------------------------------------------------------------ in the threads

    def _compile(self, text: str) -> Matcher:
        matcher = self._library.compile(text)
        # the first mask may take as long as a step; copies know what it was computed from
        matcher.fill(np.zeros(self._library.num_words, np.uint32))
        return matcher

    def _compute(self, work: list[tuple[SequenceGrammar, Future[Matcher]]]) -> list[Mask]:
        return [self._mask(grammar, compiled) for grammar, compiled in work]

    def _mask(self, grammar: SequenceGrammar, compiled: Future[Matcher]) -> Mask:
        if grammar.is_reasoning:
            return self._any_but_end
        words_W = np.zeros(self._library.num_words, np.uint32)
        num_tokens, began = max(1, len(grammar.answer) - grammar.num_followed), self._clock()
        try:
            if grammar.matcher is None:
                grammar.matcher = compiled.result().copy()
            if (matcher := self._follow(grammar, grammar.matcher)) is not None:
                matcher.fill(words_W)
            took_s = min(self._clock() - began, num_tokens * MAX_COUNTED_S)
            grammar.debt_s = max(0.0, grammar.debt_s + took_s - num_tokens * MAX_MASK_S)
            if grammar.debt_s > MAX_DEBT_S:
                raise GrammarTooComplex(f"its tokens take more than {MAX_MASK_S * 1e3:.0f} ms each to find")
        except GrammarError as error:
            return f"The output cannot match its grammar any more: {error}."
        if not self._can_end or (not grammar.ends_early and (words_W & ~self._eos).any()):
            words_W &= ~self._eos
        if grammar.gap and not grammar.has_begun:
            words_W |= self._spaces()
        if (token_id := grammar.next_opening_id) is not None and token_id // 32 < len(words_W):
            words_W[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words_W.tobytes()

    def _follow(self, grammar: SequenceGrammar, matcher: Matcher) -> Matcher | None:
        """Return a matcher that has taken all tokens of the answer. None: they cannot be one, but open reasoning."""
        new = grammar.answer[grammar.num_followed :]
        if new and grammar.next_opening_id is not None:  # whether reasoning opens is not known yet
            if not matcher.accepts(new):
                return None
            matcher = matcher.copy()
            matcher.consume(new)
            return matcher
        while new and grammar.gap and not grammar.has_begun and not matcher.accepts(new[:1]):
            grammar.gap -= 1
            grammar.num_followed += 1
            del new[0]
        if new:
            matcher.consume(new)
            grammar.has_begun = True
            grammar.num_followed += len(new)
        return matcher

    def _spaces(self) -> Words:
        if self._white_space is None:
            self._white_space = np.zeros(self._library.num_words, np.uint32)
            self._library.compile(_WHITE_SPACE).fill(self._white_space)
            self._white_space &= ~self._eos
        return self._white_space
