"""Grammars whose later masks, not only the first, would take the engine too long."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.grammars.grammar_library import MAX_MASK_S, Matcher, Words
from quipu.actors.grammars.grammar_walk import WALKS
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.outcomes import ErrorKind, RequestError
from tests.grammars import EOS, PARAM, PERSON, UNION, regex, schema, tiny_grammars

NAMES = [f"p{number}" for number in range(1000)]
KINDS_OF_LISTS = [{"type": "array", "items": {"const": number}} for number in range(900)]
WIDE = {"type": "object", "properties": {name: {"type": "integer"} for name in NAMES}, "required": NAMES[:1]}
LISTS = {"type": "array", "items": {"anyOf": KINDS_OF_LISTS}}
JSON_IN_GBNF = """
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\\"" ( [^"\\\\\\x7F\\x00-\\x1F] | "\\\\" (["\\\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\\n" [ \\t]{0,20}
"""


def lark(source: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, source, PARAM)


def recursive(rule: str, sign: str, numbers: Sequence[int] = range(1800)) -> GrammarSpec:
    """Return a grammar of many alternatives, each of which is followed by all of them again."""
    return lark(f"{rule}{sign} " + " | ".join(f'"{number}" {rule}' for number in numbers))


def check(spec: GrammarSpec, clock: Callable[[], float] = lambda: 0.0) -> str | RequestError:
    """Check a grammar with a clock. By default no time passes, so that the machine does not matter."""
    return GrammarChecker(tiny_grammars(), 200_000, clock=clock).check(spec)


class StepClock:
    """A clock by which the masks take the given times, one after the other, and everything else none."""

    def __init__(self, mask_s: Sequence[float]) -> None:
        self._mask_s = list(mask_s)
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self) -> None:
        self.now_s += self._mask_s.pop(0) if self._mask_s else 0.0


def with_masks_of(monkeypatch: pytest.MonkeyPatch, mask_s: Sequence[float]) -> StepClock:
    clock, fill = StepClock([0.0, *mask_s]), Matcher.fill  # the first mask is a part of compiling

    def fill_and_advance(matcher: Matcher, words_W: Words) -> None:
        fill(matcher, words_W)
        clock.advance()

    monkeypatch.setattr(Matcher, "fill", fill_and_advance)
    return clock


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(recursive("root", "::="), id="GBNF"),
        pytest.param(recursive("start", ":"), id="Lark"),
        pytest.param(schema(LISTS), id="JSON schema"),
    ],
)
def test_wide_recursion_is_refused(spec: GrammarSpec) -> None:
    """A grammar whose later masks take too many steps is an error that names the field, on every machine."""
    error = check(spec)
    assert isinstance(error, RequestError)
    assert error.kind is ErrorKind.INVALID and error.param == PARAM
    assert error.message.startswith(f"Invalid value for `{PARAM}`: it is too complex to follow (")


@pytest.mark.parametrize(
    "spec",
    [
        schema(PERSON),
        schema(UNION),
        schema({"type": "object", "properties": {name: {} for name in NAMES[:497]}}),
        schema(
            {
                "type": "object",
                "properties": (p := {f"p{i}": {"type": "string"} for i in range(1000)}),
                "required": [*p],
            }
        ),
        schema(WIDE),
        lark(f"start: %json {json.dumps(WIDE)}"),
        schema({"type": "array", "items": {"enum": [f"value {i}" for i in range(4000)]}}),
        schema({"type": "array", "items": {"anyOf": KINDS_OF_LISTS[:200]}}),
        regex(r"(\d{3}-){2}\d{4}"),
        lark(JSON_IN_GBNF),
        lark('root ::= expr\nexpr ::= expr op expr | [0-9]+ | "(" expr ")"\nop ::= "+" | "-"'),
        recursive("start", ":", range(100)),
    ],
)
def test_ordinary_grammars_are_accepted(spec: GrammarSpec) -> None:
    """Large schemas, and grammars that refer to themselves, stay far below the limits."""
    assert isinstance(check(spec), str)


def test_slow_masks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar with a mask that takes too long three times in a row is refused; one slow moment is not enough."""
    slow, fast = 1.1 * MAX_MASK_S, 0.9 * MAX_MASK_S
    for mask_s in ([slow] * 3, [fast, fast, slow, slow, slow]):
        error = check(schema(PERSON), with_masks_of(monkeypatch, mask_s))
        assert isinstance(error, RequestError) and "too complex" in error.message and "10 ms" in error.message
    for mask_s in ([fast], [slow, slow, fast], [slow, fast] * 2):
        assert isinstance(check(schema(PERSON), with_masks_of(monkeypatch, mask_s)), str)


def test_walks_are_short_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's walks draw the same few tokens each time, fewer if masks take long, and never an EOS token."""
    consume, taken = Matcher.consume, list[int]()

    def consume_and_note(matcher: Matcher, token_ids: Sequence[int]) -> None:
        taken.extend(token_ids)
        consume(matcher, token_ids)

    monkeypatch.setattr(Matcher, "consume", consume_and_note)
    runs: list[list[int]] = []
    ticks = count()
    for clock in (lambda: 0.0, lambda: 0.0, lambda: next(ticks) * MAX_MASK_S / 2):
        assert isinstance(check(schema({"type": "object"}), clock), str)
        runs.append(list(taken))
        taken.clear()
    first, again, cut = runs
    assert first == again and 12 < len(first) <= 1 + sum(WALKS) and EOS not in first
    assert cut == first[: len(cut)] and 1 < len(cut) < 12


@pytest.mark.parametrize(
    "source", ['start: "a" | "b" | ""', 'start: "a" x\nx: "b" | "c" nothing\nnothing: /[^\\s\\S]/']
)
def test_short_walks_are_accepted(source: str) -> None:
    """A grammar whose outputs end soon is accepted, as is one with a dead end."""
    assert isinstance(check(lark(source)), str)
