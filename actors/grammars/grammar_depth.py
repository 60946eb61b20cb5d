"""Limits the depth of grammars: the library follows references on the stack, whose overflow kills the process.

A chain of 800 definitions, each of which refers to the next, overflows 8 MiB. Used by `grammar_text.py` before the
library sees a grammar. What must always hold: no path through a grammar is deeper than computed here, whatever the
order of its rules; the time is linear in the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from .grammar_library import GrammarError
from .schema_places import resolve_pointer

MAX_DEPTH = 512
"""Levels of rules, parentheses, objects and lists on one path through a grammar, each of 4 KiB at most."""
_MAX_PARENTHESES = 30
"""The library's own limit for one rule."""
_JSON = re.compile(r"%json\s*")
_HEAD = re.compile(r"^[ \t]*[?!]?([\w-]+)", re.MULTILINE)
"""A word at the start of a line is the name of a rule, except in patterns of several lines."""
_WORD = re.compile(r"[\w-]+")
_CLOSED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_ANCHORS = ("$anchor", "$dynamicAnchor")
_IDS = ("$id", "id")
"""Within a schema, pointers are relative to the object that has one."""
_REFERENCES = ("$ref", "$dynamicRef")


def check_depth_of_schema(schema: Any) -> None:
    """Raise GrammarError for a JSON schema that is too deep."""
    if _depth_of_schema(schema) > MAX_DEPTH:
        raise _too_deep()


def check_depth_of_lark(source: str) -> None:
    """Raise GrammarError for a grammar in Lark that is too deep."""
    heads = list(_HEAD.finditer(source))
    numbers: dict[str, int] = {}
    for head in heads:
        numbers.setdefault(head[1], len(numbers))
    weights, edges = [1] * len(numbers), [set[int]() for _ in numbers]
    may_continue = False
    ends = [head.start() for head in heads[1:]] + [len(source)] * bool(heads)
    for index, (head, end) in enumerate(zip(heads, ends, strict=True)):
        rule, number = source[head.start() : end], numbers[head[1]]
        weights[number] += min(rule.count("(") + rule.count("["), _MAX_PARENTHESES) + _depth_of_embedded(rule)
        edges[number].update(numbers[word] for word in _WORD.findall(rule) if word in numbers)
        # the next line may still be part of this rule: from here on, no line is sure to end one
        may_continue = may_continue or "%lark" in rule or "/" in _CLOSED.sub("", rule)
        if may_continue and index + 1 < len(heads):
            edges[number].add(numbers[heads[index + 1][1]])
    if _longest(weights, edges) > MAX_DEPTH:
        raise _too_deep()


def _too_deep() -> GrammarError:
    return GrammarError(f"its definitions, one within the other, must be nested at most {MAX_DEPTH} deep")


def _depth_of_embedded(rule: str) -> int:
    depth, at = 0, 0
    while (found := _JSON.search(rule, at)) is not None:
        try:
            schema, at = json.JSONDecoder().raw_decode(rule, found.end())
        except (ValueError, RecursionError):  # the library cannot read it either
            return depth
        depth += _depth_of_schema(schema)
    return depth


def _depth_of_schema(schema: Any) -> int:
    parts, edges, anchors = [schema], [set[int]()], dict[str, int]()
    references: list[tuple[int, str]] = []
    numbers = {id(schema): 0}
    is_plain = True
    for number, part in enumerate(parts):  # which grows
        if isinstance(part, dict):
            names = (part[key] for key in _ANCHORS if key in part)
            for name in names:
                is_plain = is_plain and isinstance(name, str) and anchors.setdefault(name, number) == number
            is_plain = is_plain and not (number and any(isinstance(part.get(key), str) for key in _IDS))
            targets = (part[key] for key in _REFERENCES if key in part)
            references += [(number, target) for target in targets if isinstance(target, str)]
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            if isinstance(inner, dict | list):
                numbers[id(inner)] = len(parts)
                edges[number].add(len(parts))
                parts.append(inner)
                edges.append(set())
    for number, reference in references:
        found = numbers.get(id(resolve_pointer(schema, reference)))
        found = anchors.get(reference.removeprefix("#")) if found is None else found
        # an unknown reference may lead anywhere in the schema
        edges[number].add(found if is_plain and found is not None else 0)
    return _longest([1] * len(parts), edges)


def _longest(weights: list[int], edges: list[set[int]]) -> int:
    """Return the largest weight of a path through a graph; a path that enters a cycle has the weight of all of it.

    Tarjan's algorithm, which completes a cycle after everything that it leads to.
    """
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    depths: dict[int, int] = {}
    """Of the vertices whose cycle is complete."""
    stack: list[int] = []
    for start in range(len(weights)):
        if start in order:
            continue
        waiting = [(start, iter(edges[start]))]
        order[start] = lowest[start] = len(order)
        stack.append(start)
        while waiting:
            vertex, rest = waiting[-1]
            for following in rest:
                if following not in order:
                    order[following] = lowest[following] = len(order)
                    stack.append(following)
                    waiting.append((following, iter(edges[following])))
                    break
                if following not in depths:
                    lowest[vertex] = min(lowest[vertex], order[following])
            else:
                waiting.pop()
                if waiting:
                    lowest[waiting[-1][0]] = min(lowest[waiting[-1][0]], lowest[vertex])
                if lowest[vertex] == order[vertex]:
                    cycle = [stack.pop()]
                    while cycle[-1] != vertex:
                        cycle.append(stack.pop())
                    _close(cycle, weights, edges, depths)
    return max(depths.values(), default=0)


def _close(cycle: Collection[int], weights: list[int], edges: list[set[int]], depths: dict[int, int]) -> None:
    own = sum(weights[vertex] for vertex in cycle)
    below = max((depths.get(following, 0) for vertex in cycle for following in edges[vertex]), default=0)
    depths.update(dict.fromkeys(cycle, own + below))
