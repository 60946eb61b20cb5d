"""Translates GBNF, the notation of llama.cpp and xgrammar (`root ::= …`), to llguidance's dialect of Lark.

Used by `grammar_text.py`. The library's own converter takes time quadratic in the number of rules, and its lexer takes
the longest match, so that `root ::= word "b"` with `word ::= [a-z]+` would never end. What must always hold: the Lark
grammar has exactly the outputs of the GBNF grammar; the time is linear in the text.

    no rule refers to itself    one terminal, made of the rules: the library compiles it to one automaton
    otherwise                   rules whose terminals are single characters, for which longest and only are the same
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from .grammar_library import GrammarError
from .text_values import pattern_of

MAX_CHARS = 1 << 15
"""The library's time is quadratic in the alternatives of one rule."""
MAX_DEPTH = 24
"""Nesting depth of parentheses; the library's limit is slightly higher."""
MAX_RULES = 4096
MAX_REPEATS = 4096
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | \#[^\n]* )
    | (?P<defines> ::= )
    | (?P<literal> "(?:[^"\\\n]|\\.)*" )
    | (?P<set> \[(?:[^\]\\]|\\.)*\] )
    | (?P<name> [a-zA-Z0-9_-]+ )
    | (?P<repeat> [*+?] | \{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\} )
    | (?P<mark> [().|] )
    """,
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^a-zA-Z0-9]|[nrt]))|([^\\])", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ROOT = "root"


def is_gbnf(source: str) -> bool:
    """Return whether a grammar has a rule in GBNF's notation, which no Lark grammar has."""
    return _RULE.search(source) is not None


def lark_of(source: str) -> str:
    """Return a GBNF grammar as Lark. Raises GrammarError with the line of what is wrong."""
    if len(source) > MAX_CHARS:
        raise GrammarError(f"a GBNF grammar must have at most {MAX_CHARS} characters")
    rules = {rule.name: rule for rule in _Reader(source).rules()}
    if _ROOT not in rules:
        raise GrammarError("a GBNF grammar must have a rule `root`")
    used = _reachable(rules)
    is_regular = not _has_cycle(used)
    names = {name: f"R{number}" if is_regular else f"r{number}" for number, name in enumerate(used)}
    lines = [f"start: {names[_ROOT]}"]
    for rule in used.values():
        body = (names[part.name] if isinstance(part, _Reference) else part for part in rule.written(is_regular))
        lines.append(f"{names[rule.name]}: {' '.join(body)}")
    return "\n".join(lines) + "\n"


@attrs.frozen
class _Reference:
    name: str
    line: int


@attrs.frozen
class _Literal:
    text: str


@attrs.frozen
class _Rule:
    name: str
    parts: list[_Reference | _Literal | str] = attrs.field(factory=list)
    """What is neither a reference nor a literal is written as in Lark."""

    def references(self) -> Iterator[_Reference]:
        return (part for part in self.parts if isinstance(part, _Reference))

    def written(self, is_regular: bool) -> Iterator[_Reference | str]:
        for part in self.parts:
            if isinstance(part, _Literal):
                each = [part.text] if is_regular or not part.text else part.text
                yield f"({' '.join(map(_pattern, each))})"
            else:
                yield part


@attrs.define
class _Reader:
    """Reads rules. A rule lasts until the next name with `::=`."""

    _source: str
    _line: int = 1
    _depth: int = 0
    _may_repeat: bool = False
    """Whether a quantifier may come here."""
    _is_empty: bool = True
    """Whether an alternative begins here."""

    def rules(self) -> Iterator[_Rule]:
        """Yield the rules. Raises GrammarError."""
        found: set[str] = set()
        rule: _Rule | None = None
        name: _Reference | None = None  # until it is known whether it begins a rule
        for kind, text in self._tokens():
            if kind == "defines":
                if name is None or name.name in found or len(found) >= MAX_RULES:
                    raise self._error(f"expected the name of another rule, of at most {MAX_RULES}, before `::=`")
                if rule is not None:
                    yield self._ended(rule)
                found.add(name.name)
                rule, name = _Rule(name.name), None
                self._depth, self._may_repeat, self._is_empty = 0, False, True
                continue
            if rule is None and (name is not None or kind != "name"):
                raise self._error("expected the name of a rule and `::=`")
            if rule is not None and name is not None:
                self._take_name(rule, name)
            name = _Reference(text, self._line) if kind == "name" else None
            if rule is not None and name is None:
                self._take(rule, kind, text)
        if rule is None:
            raise self._error("expected `::=`")
        if name is not None:
            self._take_name(rule, name)
        yield self._ended(rule)

    def _take_name(self, rule: _Rule, name: _Reference) -> None:
        rule.parts.append(name)
        self._may_repeat, self._is_empty = True, False

    def _take(self, rule: _Rule, kind: str, text: str) -> None:
        if kind == "repeat":
            if not self._may_repeat:
                raise self._error(f"there is nothing that `{text}` could repeat")
            rule.parts.append(self._repeat(text))
            self._may_repeat = False
            return
        if text in (")", "|") and self._is_empty:
            rule.parts.append('""')
        is_mark = kind == "mark" and text != "."
        self._depth += is_mark and (text == "(") - (text == ")")
        if not 0 <= self._depth <= MAX_DEPTH:
            raise self._error(
                "an unmatched `)`" if self._depth < 0 else f"parentheses nested more than {MAX_DEPTH} deep"
            )
        rule.parts.append(text if is_mark else self._operand(kind, text))
        self._may_repeat, self._is_empty = not is_mark or text == ")", is_mark and text != ")"

    def _ended(self, rule: _Rule) -> _Rule:
        if self._depth:
            raise self._error("an unmatched `(`")
        if self._is_empty:
            rule.parts.append('""')
        return rule

    def _tokens(self) -> Iterator[tuple[str, str]]:
        source, at = self._source, 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise self._error(f"unexpected {source[at : at + 20]!r}")
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0]
            self._line += found[0].count("\n")
            at = found.end()

    def _operand(self, kind: str, text: str) -> _Literal | str:
        if kind == "literal":
            return _Literal("".join(char for char, _ in self._chars(text[1:-1])))
        if text == ".":
            return "/(?s:.)/"
        is_negated = text.startswith("[^")
        ranges = self._ranges(text[2:-1] if is_negated else text[1:-1])
        if not ranges and not is_negated:
            raise self._error("an empty set of characters")
        if not ranges:
            return "/(?s:.)/"
        return f"/[{'^' if is_negated else ''}{''.join(ranges)}]/"

    def _ranges(self, text: str) -> list[str]:
        chars = list(self._chars(text))
        ranges, at = [], 0
        while at < len(chars):
            low = high = chars[at][0]
            at += 1
            if at + 1 < len(chars) and chars[at] == ("-", False):
                high = chars[at + 1][0]
                at += 2
                if high < low:
                    raise self._error(f"the range {low!r} to {high!r} is empty")
            ranges.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        return ranges

    def _chars(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield each character, and whether it is escaped."""
        at = 0
        while at < len(text):
            found = _CHAR.match(text, at)
            if found is None:
                raise self._error(f"unknown escape {text[at : at + 2]!r}")
            code = int(found[1] or found[2] or found[3] or "0", 16)
            if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
                raise self._error(f"{found[0]} is no character")
            plain = found[4] or found[5]
            yield chr(code) if plain is None else _ESCAPES.get(plain, plain) if found[4] else plain, found[5] is None
            at = found.end()

    def _repeat(self, text: str) -> str:
        counts = re.findall("[0-9]+", text)
        if any(int(count) > MAX_REPEATS for count in counts):
            raise self._error(f"more than {MAX_REPEATS} repetitions")
        if len(counts) == 2 and int(counts[0]) > int(counts[1]):
            raise self._error(f"`{text}` allows no number of repetitions")
        return re.sub(r"\s", "", text)

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"line {self._line} of the GBNF grammar: {problem}")


def _pattern(text: str) -> str:
    return f"/{pattern_of(text)}/" if text else '""'


def _reachable(rules: dict[str, _Rule]) -> dict[str, _Rule]:
    """Return the rules that `root` uses. Raises GrammarError if one of them is missing."""
    used, waiting = {_ROOT: rules[_ROOT]}, [rules[_ROOT]]
    while waiting:
        for reference in waiting.pop().references():
            if reference.name not in rules:
                name = reference.name[:80]
                raise GrammarError(f"line {reference.line} of the GBNF grammar: there is no rule `{name}`")
            if reference.name not in used:
                used[reference.name] = rules[reference.name]
                waiting.append(rules[reference.name])
    return used


def _has_cycle(rules: dict[str, _Rule]) -> bool:
    """Return whether a rule refers to itself, or to one that does."""
    inner = {name: {reference.name for reference in rule.references()} for name, rule in rules.items()}
    num_uses = dict.fromkeys(rules, 0)
    for names in inner.values():
        for name in names:
            num_uses[name] += 1
    free = [name for name, count in num_uses.items() if not count]
    num_free = 0
    while free:
        num_free += 1
        for name in inner[free.pop()]:
            num_uses[name] -= 1
            if not num_uses[name]:
                free.append(name)
    return num_free < len(rules)
