"""Draws outputs of a grammar as the engine does, one allowed token after the other.

Tokens are drawn by a seed, half of them among those that close a value, so that most outputs end early.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from quipu.actors.engine.executor.mask_rows import RowAsk, RowMasks
from quipu.actors.grammars.grammar_library import GrammarError, GrammarLibrary

Flags = npt.NDArray[np.bool_]

PART_SHARE = 0.3
"""How often an example is begun where it might be."""
CLOSING = frozenset({'"', "}", "]", '"}', '"]', "}}", "]]", "]}", "}]"})


@attrs.frozen
class Output:
    token_ids: list[int]
    """Without the one that ended it."""
    has_ended: bool


class OutputFailed(Exception):
    """No token was allowed."""


class Drawer:
    """Draws outputs of one vocabulary."""

    def __init__(self, library: GrammarLibrary, tokenizer: dict[str, Any], end_id: int, seed: int) -> None:
        self._compile = lru_cache(maxsize=64)(partial(RowMasks, library, can_end=True))
        self._end_id = end_id
        self._random = np.random.default_rng(seed)
        self._tokenizer = Tokenizer.from_buffer(json.dumps(tokenizer).encode())
        self._closing = np.zeros(32 * library.num_words, np.bool_)
        self._short = np.zeros(32 * library.num_words, np.bool_)
        for entry, token_id in tokenizer["model"]["vocab"].items():
            self._closing[token_id] = entry in CLOSING
            self._short[token_id] = len(entry) == 1

    def draw(self, grammar: str, max_tokens: int) -> Output:
        """Draw an output. Raises OutputFailed."""
        return self._continued(grammar, [], max_tokens, 0.5)

    def finished(
        self, grammar: str, output: Output, max_tokens: int, attempts: int, examples: Sequence[str]
    ) -> Output | None:
        """Continue an output until it ends. None: it did not within so many tokens and attempts.

        `examples`: strings that may be parts of it, which are used in every second attempt, since they make it longer.
        """
        parts = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in examples]
        for attempt in range(attempts):
            longer = self._continued(grammar, output.token_ids, max_tokens, 0.95, parts if attempt % 2 else ())
            if longer.has_ended:
                return longer
        return None

    def text(self, output: Output) -> str:
        return str(self._tokenizer.decode(output.token_ids, skip_special_tokens=False))

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, and the one that ends it."""
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end_id]

    def _continued(
        self,
        grammar: str,
        token_ids: list[int],
        max_tokens: int,
        closing: float,
        parts: Sequence[Sequence[int]] = (),
    ) -> Output:
        drawn, is_new, new_ids = [*token_ids], True, token_ids
        wanted: list[int] = []  # the rest of a part that has begun, last token first
        for _ in range(max_tokens):
            try:
                mask = self._compile(grammar).mask(RowAsk(0, is_new, new_ids, 0, None, ends_early=True))
            except GrammarError as error:
                raise OutputFailed(str(error)) from None
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
            if not allowed.any():
                raise OutputFailed("no token is allowed")
            if parts and not wanted and self._random.random() < PART_SHARE:
                wanted = [*reversed(parts[int(self._random.integers(len(parts)))])]
            if wanted and allowed[wanted[-1]]:
                token_id = wanted.pop()
            else:
                wanted.clear()
                token_id = self._choice(allowed, closing)
            if token_id == self._end_id:
                return Output(drawn, has_ended=True)
            drawn.append(token_id)
            is_new, new_ids = False, [token_id]
        return Output(drawn, has_ended=False)

    def _choice(self, allowed: Flags, closing: float) -> int:
        draw = self._random.random()
        if allowed[self._end_id] and draw < closing:
            return self._end_id
        for group, share in ((self._closing, closing), (self._short, 0.6)):
            if self._random.random() < share and (found := np.flatnonzero(allowed & group)).size:
                return int(self._random.choice(found))
        return int(self._random.choice(np.flatnonzero(allowed)))
