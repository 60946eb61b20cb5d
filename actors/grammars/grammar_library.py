"""The only place that calls the `llguidance` library, which compiles grammars and says which tokens they allow next.

The tokenizer checks a request's grammar with it (`grammar_check.py`); the executor follows each output
(`executor/grammars.py`). Three properties of the library are hidden here:

- It never raises. After each call, the matcher's error becomes a `GrammarError`.
- Loading a tokenizer holds the GIL (0.9 s for 150,000 tokens), so it is done once, at start. Compiling and masks
  release it.
- Once a grammar can neither go on nor fail, its mask holds the tokens that end a sequence.

What must always hold: the cost of a grammar is bounded by `_limits`, which count work and not time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import attrs
import llguidance
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

MAX_ITEMS = 20_000
"""Items of one mask: 8 ms in rows of up to 2,000. Time is quadratic in the length of a row.

An object of 1,990 properties has 18,000.
"""
_FEWEST_ITEMS, _TOKENS_AN_ITEM = 4_000, 12
"""For a grammar without a schema, whose items grow with the vocabulary."""


def _limits(max_items: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 14 ms
        step_max_items=max_items,
        max_lexer_states=50_000,  # 100 MB
        max_grammar_size=100_000,
        verbose_errors=False,
    )


MAX_MASK_S = 0.010
"""Processor time for one mask. `_limits` keep below it, except for rows of many thousands of items.

llama.cpp's `json.gbnf` takes 10,000 items and 3 ms for a vocabulary of 129,000, and 17,000 and 6 ms for 248,000; no
schema of the collections in docs/use/structured-output.md takes more than 500 items.
"""

STRING_ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in JSON. Not `u`: keys with it would not be recognized as `properties`."""
_SCHEMA_WORDS = ('"json_schema"', "%json")
"""A grammar has a schema if its text contains one of these."""
_TOO_MANY = "Too many items"
"""Part of the library's message for a mask that exceeds `step_max_items`."""
_WIDTH = re.compile(r"Current row has (\d+) items")
"""Part of its message for a place with more than 2,000 alternatives."""
_MAX_WIDTH = 4_000
"""Number of alternatives from which such a place is costly even before an output reaches it."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot be followed any further."""


class GrammarTooComplex(GrammarError):
    """Finding the tokens that a grammar allows next takes too long."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"it is too complex to follow ({reason})")


def json_grammar(schema: dict[str, Any]) -> str:
    """Write a JSON schema as the library's text. Values are compact, without white space between their tokens."""
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False,
            "item_separator": ",",
            "key_separator": ":",
            "json_allowed_escapes": STRING_ESCAPES,
        },
    )


def are_disjoint_patterns(patterns: Collection[str]) -> bool:
    """Return whether no name matches two patterns, as the library requires of `patternProperties`."""
    schema = {"type": "object", "patternProperties": {pattern: {} for pattern in patterns}}
    return not llguidance.LLMatcher.validate_grammar(json_grammar(schema), limits=_limits(MAX_ITEMS))


@lru_cache(maxsize=256)
def is_known_class(escape: str) -> bool:
    """Return whether the library knows an escape for a class of characters, such as `\\p{Greek}`."""
    return not llguidance.LLMatcher.validate_grammar(regex_grammar(escape), limits=_limits(MAX_ITEMS))


def regex_grammar(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def lark_grammar(source: str) -> str:
    """Write a grammar in the library's dialect of Lark as its text."""
    return llguidance.LLMatcher.grammar_from_lark(source)


class GrammarLibrary:
    """Compiles grammars for one tokenizer. Its methods may be called by several threads at once."""

    def __init__(self, tokenizer_json: bytes, eos_token_ids: tuple[int, ...]) -> None:
        """Load the contents of a `tokenizer.json`. Raises ValueError."""
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json.decode(), eos_token=list(eos_token_ids) or None)
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        """Length of a mask, in words of 32 bits."""
        bits = np.zeros(32 * self.num_words, np.uint8)
        bits[self._tokenizer.eos_tokens] = 1
        self.end_mask: Words = np.packbits(bits, bitorder="little").view(np.uint32)
        """The tokens that a grammar allows where it may end."""
        self._schema_limits = _limits(MAX_ITEMS)
        self._rule_limits = _limits(min(MAX_ITEMS, _FEWEST_ITEMS + self._tokenizer.vocab_size // _TOKENS_AN_ITEM))

    def compile(self, text: str) -> Matcher:
        """Compile a grammar, as `grammar_text` writes it. Raises GrammarError."""
        has_schema = any(words in text for words in _SCHEMA_WORDS)
        limits = self._schema_limits if has_schema else self._rule_limits
        matcher = Matcher(llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits))
        matcher.check()
        return matcher


@lru_cache(maxsize=2)
def load_grammars(tokenizer_json: bytes, eos_token_ids: tuple[int, ...]) -> GrammarLibrary | None:
    """Return the library for a tokenizer, cached.

    None: the library cannot tell the bytes of its tokens (WordPiece, or Metaspace without byte fallback).
    """
    try:
        return GrammarLibrary(tokenizer_json, eos_token_ids)
    except ValueError:
        return None


@attrs.frozen(eq=False)
class Matcher:
    """What a grammar allows after some tokens. To be used by one thread at a time."""

    _matcher: llguidance.LLMatcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    def check(self) -> None:
        """Raise GrammarError if the library has given up, or has ignored a part of the grammar."""
        if self._matcher.is_error():
            error = self._matcher.get_error().removesuffix("<non-verbose/>").strip().rstrip(".")
            width = _WIDTH.search(error)
            if _TOO_MANY in error or (width is not None and int(width[1]) > _MAX_WIDTH):
                raise GrammarTooComplex(error)
            raise GrammarError(error or "it does not fit the output")
        if warnings := self._matcher.get_grammar_warnings():
            raise GrammarError("; ".join(warnings))

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens could come next."""
        return self._matcher.validate_tokens(list(token_ids)) == len(token_ids)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output. Raises GrammarError if the grammar does not allow them."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))
            self.check()

    def forced(self) -> list[int]:
        """Return the tokens that have to come next, each the only one that may, as far as the library knows them."""
        token_ids: list[int] = self._matcher.compute_ff_tokens()
        return token_ids

    def fill(self, words_W: Words) -> None:
        """Write the mask of the tokens that may come next. Raises GrammarError."""
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        self.check()
