"""Delimiters as one automaton: what `DelimiterScanner` runs.

Built once per template. Each delimiter is compiled to states without empty transitions (Thompson's construction, after
R. Cox, "Regular Expression Matching: the Virtual Machine Approach"). One named group per delimiter is captured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

import attrs

from .output_patterns import MAX_STATES, CharSet, Choice, Group, Node, Repeat, Sequence, UnsupportedPattern

CAPTURE_START = 1
CAPTURE_END = 2


class Meaning(Enum):
    REASONING_OPEN = auto()
    REASONING_CLOSE = auto()
    CALL_OPEN = auto()
    CALL_CLOSE = auto()
    TEXT_CLOSE = auto()
    """The end of a turn, which some templates expect in the answer."""
    ARGUMENT_OPEN = auto()
    ARGUMENT_CLOSE = auto()


@attrs.frozen
class Delimiter:
    meaning: Meaning
    pattern: Node
    number: int = 0
    """Which of the template's call formats it belongs to."""


@attrs.frozen
class Arrow:
    """A transition to a state, or to acceptance if `target` is None."""

    target: int | None
    captures: int
    delimiter: int


class DelimiterPrograms:
    """The states of all delimiters that are looked for at a time."""

    def __init__(self, delimiters: Iterable[Delimiter]) -> None:
        self.delimiters = tuple(delimiters)
        self.tests: list[CharSet] = []
        """What each state consumes."""
        self.arrows: list[tuple[Arrow, ...]] = []
        """Where each state goes then."""
        start: list[Arrow] = []
        for number, delimiter in enumerate(self.delimiters):
            builder = _Builder()
            first = builder.node(delimiter.pattern, builder.accept)
            offset = len(self.tests)
            arrows = builder.arrows(first, offset, number)
            if any(arrow.target is None for arrow in arrows):
                raise UnsupportedPattern("a delimiter that matches the empty text is not supported")
            start.extend(arrows)
            for test, following in builder.consuming():
                self.tests.append(test)
                self.arrows.append(builder.arrows(following, offset, number))
        self.start = tuple(start)
        self.trigger = re.compile(_first_characters([self.tests[a.target] for a in start if a.target is not None]))
        """Finds the characters with which a delimiter may begin."""


class _Builder:
    """One delimiter's states; built from its end."""

    def __init__(self) -> None:
        self.accept = 0
        self._states: list[tuple[CharSet | int, tuple[int, ...]]] = [(0, ())]
        """What each state consumes (or which capture it notes) and its successors."""
        self._groups: set[str] = set()
        self._numbers: dict[int, int] = {}

    def _add(self, what: CharSet | int, *following: int) -> int:
        if len(self._states) >= MAX_STATES:
            raise UnsupportedPattern(f"a pattern of more than {MAX_STATES} states is not supported")
        self._states.append((what, following))
        return len(self._states) - 1

    def node(self, node: Node, following: int) -> int:
        """Add the states of `node`, after which `following` comes. Return the first one."""
        match node:
            case CharSet():
                return self._add(node, following)
            case Sequence():
                for item in reversed(node.items):
                    following = self.node(item, following)
                return following
            case Choice():
                return self._add(0, *[self.node(option, following) for option in node.options])
            case Group():
                self._groups.add(node.name)
                if len(self._groups) > 1:
                    raise UnsupportedPattern("a pattern with several named groups is not supported")
                return self._add(CAPTURE_START, self.node(node.item, self._add(CAPTURE_END, following)))
            case Repeat():
                return self._repeat(node, following)

    def _repeat(self, node: Repeat, following: int) -> int:
        if node.is_lazy:
            raise UnsupportedPattern("a lazy quantifier is not supported in a delimiter")
        if node.most is None:
            loop = self._add(0, following)
            again = self.node(node.item, loop)
            self._states[loop] = (0, (again, following))
            following = loop
        else:
            for _ in range(node.most - node.least):
                following = self._add(0, self.node(node.item, following), following)
        for _ in range(node.least):
            following = self.node(node.item, following)
        return following

    def consuming(self) -> list[tuple[CharSet, int]]:
        return [(what, following[0]) for what, following in self._states if isinstance(what, CharSet)]

    def arrows(self, state: int, offset: int, delimiter: int) -> tuple[Arrow, ...]:
        """Return the transitions to what can be consumed from `state` on."""
        if not self._numbers:
            consuming = [at for at, (what, _) in enumerate(self._states) if isinstance(what, CharSet)]
            self._numbers = {at: number for number, at in enumerate(consuming)}
        found: dict[int | None, Arrow] = {}
        seen = set()
        waiting = [(state, 0)]
        while waiting:
            at, captures = waiting.pop()
            if (at, captures) in seen:
                continue
            seen.add((at, captures))
            what, following = self._states[at]
            if at == self.accept:
                found.setdefault(None, Arrow(None, captures, delimiter))
            elif isinstance(what, CharSet):
                number = offset + self._numbers[at]
                found.setdefault(number, Arrow(number, captures, delimiter))
            else:
                waiting.extend((after, captures | what) for after in reversed(following))
        return tuple(found.values())


def _first_characters(tests: list[CharSet]) -> str:
    if any(test.negated or test.classes for test in tests):
        return "(?s:.)"
    chars = sorted({char for test in tests for char in test.chars})
    return "[" + "".join(map(re.escape, chars)) + "]" if chars else "(?!)"
