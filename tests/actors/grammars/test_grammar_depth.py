"""Grammars whose definitions refer to each other in long chains, by which the library would overflow its stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from quipu.actors.grammars.grammar_depth import MAX_DEPTH, check_depth_of_lark, check_depth_of_schema
from quipu.actors.grammars.grammar_library import GrammarError
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.grammars import tiny_grammars


def chain(count: int, link: Callable[[str], Any], name: str = "a") -> dict[str, Any]:
    pointer = f"#/$defs/{quote(name.replace('~', '~0').replace('/', '~1'))}"
    definitions = {f"{name}{index}": link(f"{pointer}{index + 1}") for index in range(count)}
    return {"$defs": {**definitions, f"{name}{count}": {"type": "integer"}}, "$ref": f"{pointer}0"}


def rules(count: int, link: str) -> str:
    lines = [f"a{index}: {link.format(f'a{index + 1}')}" for index in range(count)]
    return "\n".join(["start: a0", *lines, f'a{count}: "x"']) + "\n"


def anchors(count: int) -> dict[str, Any]:
    definitions = {f"{index}": {"$anchor": f"x{index}", "$ref": f"#x{index + 1}"} for index in range(count)}
    return {"$defs": {**definitions, "last": {"$anchor": f"x{count}"}}, "$ref": "#x0"}


def hidden(count: int) -> dict[str, Any]:
    """Return a chain within an object with an `$id`; at the root, its pointers would lead to decoys instead."""
    decoys: dict[str, Any] = {f"a{index}": {} for index in range(count + 1)}
    return {"$defs": {**decoys, "r": {"$id": "http://x/r", **chain(count, REF)}}, "$ref": "http://x/r"}


REF: Callable[[str], Any] = lambda target: {"$ref": target}  # noqa: E731 # as short as the others
OBJECT: Callable[[str], Any] = lambda target: {"type": "object", "properties": {"x": {"$ref": target}}}  # noqa: E731
TOO_DEEP: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.JSON_SCHEMA, chain(3000, REF)),
    (GrammarKind.JSON_SCHEMA, chain(1000, OBJECT)),
    (GrammarKind.JSON_SCHEMA, chain(3000, REF, "a b/~é")),  # unless escapes are decoded, the chain looks like a cycle
    (GrammarKind.JSON_SCHEMA, anchors(2000)),
    (GrammarKind.JSON_SCHEMA, hidden(1500)),
    (GrammarKind.LARK, rules(4000, "{}")),
    (GrammarKind.LARK, rules(4000, "{}").replace("a", "A").replace("stArt", "start")),
    (GrammarKind.LARK, rules(1000, '((("x" {})? "y" | "z")+)*')),
    (GrammarKind.LARK, rules(4000, "/x\nfake: / {}")),  # a line break in a pattern does not start a rule
    (GrammarKind.LARK, rules(2000, '%lark {{\nstart: "x"\n}} {}')),
    (GrammarKind.LARK, "start: %json " + json.dumps(chain(3000, REF))),
    (GrammarKind.LARK, "root ::= a0\n" + rules(2000, "{}").replace(":", " ::=").replace("start ::=", "other ::=")),
]


@pytest.mark.parametrize(("kind", "source"), TOO_DEEP)
def test_too_deep(kind: GrammarKind, source: Any) -> None:
    """A chain that would crash the process is refused before the library sees it."""
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(GrammarError, match=f"at most {MAX_DEPTH} deep"):
        grammar_text(GrammarSpec(kind, text, "x"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, chain(500, REF)),
        (GrammarKind.JSON_SCHEMA, chain(165, OBJECT)),
        (GrammarKind.LARK, rules(500, "{}")),
        (GrammarKind.LARK, rules(125, '((("x" {})? "y" | "z")+)*')),
        (GrammarKind.LARK, rules(18, f"{'(' * 27}{{}}{')?' * 27}")),
        (
            GrammarKind.LARK,
            "start: " + " | ".join(f"a{i}" for i in range(600)) + "".join(f"\na{i}: /x{i}/" for i in range(600)),
        ),
    ],
)
def test_deep(kind: GrammarKind, source: Any) -> None:
    """Grammars below the limit can be compiled; many definitions side by side are not deep."""
    text = source if isinstance(source, str) else json.dumps(source)
    tiny_grammars().compile(grammar_text(GrammarSpec(kind, text, "x")))


def test_cycles() -> None:
    """The depth of a recursive grammar is the length of its longest path without a repetition."""
    tree = {
        "$defs": {"n": {"properties": {"left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#"}}}},
        "$ref": "#/$defs/n",
    }
    check_depth_of_schema(tree)
    circle = chain(600, REF)
    circle["$defs"]["a600"] = {"$ref": "#/$defs/a0"}
    with pytest.raises(GrammarError):
        check_depth_of_schema(circle)
    check_depth_of_lark('start: e\ne: e "+" e | "(" e ")" | /[0-9]+/\n')
    with pytest.raises(GrammarError):
        check_depth_of_lark(rules(600, "{}").replace('"x"', "a0"))
