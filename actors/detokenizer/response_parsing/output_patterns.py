"""Patterns of delimiters, compiled to automata whose time is linear in the output.

`response_template` writes patterns as regular expressions, which run over text that a model chooses. Only what an
automaton can match is supported: literals, classes, groups, alternation, greedy repetition. `parse_pattern` refuses the
rest. What must always hold: a program has at most MAX_STATES states and never matches the empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs

MAX_STATES = 400
MAX_REPEATS = 100
_MAX_RANGE = 1000

SPECIAL_START = "\ud800"
"""The first of the lone surrogates, which represent special tokens and occur in no decoded text."""
SPECIAL_END = "\udfff"


class UnsupportedPattern(ValueError):
    """The pattern or template is outside the supported subset. The message says why."""


@attrs.frozen
class CharSet:
    chars: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    """Of `\\s \\S \\w \\W \\d \\D`, the letters."""
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        if SPECIAL_START <= char <= SPECIAL_END:
            return not self.negated and char in self.chars
        return (char in self.chars or any(_CLASSES[name](char) for name in self.classes)) is not self.negated


_CLASSES: dict[str, Callable[[str], bool]] = {
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
    "w": lambda char: char.isalnum() or char == "_",
    "W": lambda char: not (char.isalnum() or char == "_"),
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_SPACE = CharSet(classes=("s",))
ANY = CharSet(negated=True)


@attrs.frozen
class Repeat:
    item: Node
    least: int
    most: int | None
    is_lazy: bool = False


@attrs.frozen
class Group:
    name: str
    item: Node


@attrs.frozen
class Sequence:
    items: tuple[Node, ...]


@attrs.frozen
class Choice:
    options: tuple[Node, ...]


Node = CharSet | Repeat | Group | Sequence | Choice

SPACES = Repeat(_SPACE, 0, None)


def literal(text: str) -> Sequence:
    return Sequence(tuple(CharSet(frozenset(char)) for char in text))


def parse_pattern(pattern: str) -> Sequence:
    """Parse a regular expression (with DOTALL). Raises UnsupportedPattern."""
    reader = _Reader(pattern)
    node = reader.choice()
    if reader.at < len(pattern):
        raise reader.refusal("an unmatched )")
    return node if isinstance(node, Sequence) else Sequence((node,))


@attrs.define
class _Reader:
    pattern: str
    at: int = 0
    depth: int = 0

    def refusal(self, what: str) -> UnsupportedPattern:
        return UnsupportedPattern(f"pattern {self.pattern[:200]!r}: {what} is not supported")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refusal("an incomplete expression")
        self.at += 1
        return self.pattern[self.at - 1]

    def choice(self) -> Node:
        self.depth += 1
        if self.depth > 20:
            raise self.refusal("such deep nesting")
        options = [self.sequence()]
        while self.peek("|"):
            self.at += 1
            options.append(self.sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Sequence:
        items: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            items.append(self.repeated(self.atom()))
        return Sequence(tuple(items))

    def repeated(self, item: Node) -> Node:
        if self.at >= len(self.pattern) or self.pattern[self.at] not in "*+?{":
            return item
        char = self.take()
        if char == "{":
            least, most = self.bounds()
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        is_lazy = self.peek("?")
        if is_lazy:
            self.at += 1
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?{":
            raise self.refusal("a possessive or repeated quantifier")
        return Repeat(item, least, most, is_lazy)

    def bounds(self) -> tuple[int, int | None]:
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at : max(end, self.at)].partition(",")
        if not low.isdecimal() or (high and not high.isdecimal()) or max(len(low), len(high)) > 4:
            raise self.refusal("this use of {")
        self.at = end + 1
        least, most = int(low), int(high) if high else (None if comma else int(low))
        if max(least, most or 0) > MAX_REPEATS:
            raise self.refusal(f"more than {MAX_REPEATS} repetitions")
        return least, most

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return self.set()
        if char == ".":
            return ANY
        if char in "^$*+?{":
            raise self.refusal(f"this use of {char}")
        return self.escape() if char == "\\" else CharSet(frozenset(char))

    def group(self) -> Node:
        name = None
        if self.peek("?:"):
            self.at += 2
        elif self.peek("?P<") or (self.peek("?<") and not (self.peek("?<=") or self.peek("?<!"))):
            self.at = self.pattern.index("<", self.at) + 1
            name, _, _ = self.pattern[self.at :].partition(">")
            self.at += 1 + len(name)
        elif self.peek("?"):
            raise self.refusal("this kind of group")
        node = self.choice()
        if not self.peek(")"):
            raise self.refusal("an unclosed group")
        self.at += 1
        return node if name is None else Group(name, node)

    def escape(self) -> CharSet:
        char = self.take()
        if char in _CLASSES:
            return CharSet(classes=(char,))
        if char in _ESCAPES:
            return CharSet(frozenset(_ESCAPES[char]))
        if char.isalnum():
            raise self.refusal(f"\\{char}")
        return CharSet(frozenset(char))

    def set(self) -> CharSet:
        negated = self.peek("^")
        self.at += negated
        chars: set[str] = set()
        classes: list[str] = []
        is_first = True
        while is_first or not self.peek("]"):
            is_first = False
            char = self.take()
            one = self.escape() if char == "\\" else CharSet(frozenset(char))
            if char == "[" and self.peek(":"):
                raise self.refusal("a named class")
            if one.chars and self.peek("-") and not self.peek("-]"):
                self.at += 1
                (low,) = one.chars
                high = self.take()
                if high == "\\" or not low <= high or ord(high) - ord(low) > _MAX_RANGE:
                    raise self.refusal("this range")
                chars.update(map(chr, range(ord(low), ord(high) + 1)))
            else:
                chars |= one.chars
                classes.extend(one.classes)
        self.at += 1
        return CharSet(frozenset(chars), tuple(classes), negated)


def with_special_tokens(node: Node, specials: Mapping[str, frozenset[str]]) -> Node:
    match node:
        case Repeat():
            return attrs.evolve(node, item=with_special_tokens(node.item, specials))
        case Group():
            return attrs.evolve(node, item=with_special_tokens(node.item, specials))
        case Choice():
            return Choice(tuple(with_special_tokens(option, specials) for option in node.options))
        case Sequence():
            return Sequence(tuple(_replaced(flat(node.items), specials)))
        case CharSet():
            (replaced,) = _replaced([node], specials)
            return replaced


def flat(items: tuple[Node, ...]) -> list[Node]:
    return [part for item in items for part in (flat(item.items) if isinstance(item, Sequence) else [item])]


def _replaced(items: list[Node], specials: Mapping[str, frozenset[str]]) -> Iterator[Node]:
    at = 0
    text = "".join(_single(item) or SPECIAL_START for item in items)
    while at < len(items):
        token = next((token for token in specials if text.startswith(token, at)), None)
        if token is not None:
            yield CharSet(specials[token])
            at += len(token)
        else:
            item = items[at]
            yield item if isinstance(item, CharSet) else with_special_tokens(item, specials)
            at += 1


def _single(node: Node) -> str | None:
    if isinstance(node, CharSet) and len(node.chars) == 1 and not node.classes and not node.negated:
        (char,) = node.chars
        return char
    return None


def without_leading_space(node: Node) -> Sequence:
    """Drop white space from the front of a pattern: around regions that strip, the scanner takes it anyway."""
    items = flat((node,))
    while items and (items[0] == SPACES or (_single(items[0]) or "x").isspace()):
        items = items[1:]
    return Sequence(tuple(items))
