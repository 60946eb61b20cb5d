"""Checks requests' grammars before they are served.

`text_workers/grammar_pool.py` calls `GrammarChecker.check` for the tokenizer, in a thread or in another process:
compiling may take a second, and some grammars never end. What must always hold: a grammar that the library does not
support in full, or whose masks take too long, is refused.
"""

from __future__ import annotations

import math
import re
import time

import attrs
import numpy as np

from ..messages.grammar import GrammarKind, GrammarSpec
from ..messages.outcomes import ErrorKind, RequestError
from .gbnf import is_gbnf
from .grammar_library import GrammarError, GrammarLibrary, Matcher, Words
from .grammar_text import freer_text, grammar_text, path_of, schema_at
from .grammar_walk import Clock, walk

_TOGETHER = {
    "min/maxProperties only": ("maxProperties", "minProperties"),
    "patternProperty regexes": ("patternProperties",),
    "'multipleOf' has too many digits": ("multipleOf",),
}
"""Keywords that the library cannot combine with other schemas of the same value, by a part of its message."""
_LINE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
"""Begins the library's message about a part of a grammar, with its line and column."""
_NOT_ALLOWED = "doesn't satisfy the grammar"
_NO_TOKENIZER = "this model's tokenizer does not support grammars"
_NO_OUTPUT = "it allows no output"
_PATTERN, _PATTERN_ERROR = " (in regex): ", "error: "
_INDENT = 4
"""Of a pattern in the library's message."""
_ADDED_ESCAPES = (r"\/", r"\n")
"""Escapes that the library may have added to the pattern, which shift later positions."""
_MAX_REASON_CHARS = 400


@attrs.frozen
class GrammarChecker:
    _library: GrammarLibrary | None
    """None: every grammar is refused."""
    _max_bytes: int
    _max_seconds: float = math.inf
    """Of processor time to compile a grammar and to compute its first mask, which the engine spends again."""
    _clock: Clock = time.thread_time

    def check(self, spec: GrammarSpec) -> str | RequestError:
        """Return the grammar as text for the engine, or why it is refused. Called in a thread."""
        if len(spec.source.encode("utf-8", "replace")) > self._max_bytes:
            return too_long(spec, self._max_bytes)
        try:
            return self._compiled(spec)
        except (GrammarError, ValueError) as error:
            reason = _reason(str(error), spec)
        except RecursionError:  # values that were read just within the interpreter's limit
            reason = "it is nested too deeply"
        return RequestError(ErrorKind.INVALID, f"Invalid value for `{spec.param}`: {reason}.", spec.param)

    def _compiled(self, spec: GrammarSpec) -> str:
        library = self._library
        if library is None:
            raise GrammarError(_NO_TOKENIZER)
        try:
            return self._followed(library, grammar_text(spec))
        except GrammarError:
            freer = freer_text(spec)
            if freer is None:
                raise
            return self._followed(library, freer)

    def _followed(self, library: GrammarLibrary, text: str) -> str:
        started = self._clock()
        matcher = library.compile(text)
        untouched = matcher.copy()
        words_W = np.zeros(library.num_words, np.uint32)
        matcher.fill(words_W)
        if not words_W.any():
            raise GrammarError(_NO_OUTPUT)
        if (token_id := _first_token(words_W & ~library.end_mask)) is not None:
            _try_token(matcher, token_id)
        if (compiling_s := self._clock() - started) > self._max_seconds:
            raise GrammarError("it takes too long to compile")
        walk(library, untouched, compiling_s, self._clock)
        return text


def too_long(spec: GrammarSpec, max_bytes: int) -> RequestError:
    """Return the error for a grammar of more than `max_bytes`."""
    message = f"Invalid value for `{spec.param}`: a grammar must have at most {max_bytes} bytes."
    return RequestError(ErrorKind.INVALID, message, spec.param)


def _try_token(matcher: Matcher, token_id: int) -> None:
    """Raise GrammarError if a grammar has too many alternatives, or the tokenizer adds text to forced tokens."""
    try:
        matcher.consume([token_id])
    except GrammarError as error:
        # the tokenizer put a space before a text that the library encoded
        raise GrammarError(_NO_TOKENIZER) if _NOT_ALLOWED in str(error) else error from None


def _first_token(words_W: Words) -> int | None:
    (found,) = np.nonzero(words_W)
    if not len(found):
        return None
    bits = int(words_W[found[0]])
    return int(found[0]) * 32 + (bits & -bits).bit_length() - 1


def _reason(error: str, spec: GrammarSpec) -> str:
    """Return the library's message, with the place of the keyword that it does not support."""
    line = _LINE.match(error)
    field, source = "", spec.source
    if spec.kind is GrammarKind.LARK:
        found = None if line is None else schema_at(int(line[1]), spec.source)
        if line is None or found is None:
            place = None if line is None or is_gbnf(source) else f"line {line[1]}, column {line[2]}: "
            return f"{place or ''}{_plain(error)}"
        field, source = found
    keywords = next((found for words, found in _TOGETHER.items() if words in error), ())
    for keyword in keywords:
        if (path := path_of(keyword, source)) is not None:
            return f"the keyword `{keyword}` at `{field}{path}` is not supported ({_plain(error)})"
    return f"{_plain(error)} (in `{field}`)" if field else _plain(error)


def _plain(error: str) -> str:
    """Return the library's message without the grammar, which it repeats, and with the place in a pattern."""
    lines = error.split("\n")
    line = _LINE.match(error)
    first = lines[0] if line is None else lines[0][line.end() :]
    reason = next((one.removeprefix(_PATTERN_ERROR) for one in lines if one.startswith(_PATTERN_ERROR)), None)
    if reason is not None:
        mark = next((number for number, one in enumerate(lines) if "^" in one and not one.strip(" ^")), 0)
        before = lines[mark - 1][: lines[mark].find("^")][_INDENT:]
        is_known = mark > 0 and not any(escape in before for escape in _ADDED_ESCAPES)
        place = f" at character {len(before) + 1}" if is_known else ""
        return f"invalid regular expression{place}: {reason}"
    return (_NO_OUTPUT if first == "NoExtensionBias" else first.rpartition(_PATTERN)[2])[:_MAX_REASON_CHARS]
