"""What a PromQL expression names: its metrics, their selectors, and the labels that it groups by.

Used by the checks of rules and dashboards. It knows no more of the language than they need: `promtool` and a real
Prometheus check the syntax (`python -m tests.deploy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\S+")
_SELECTED = re.compile(rf"(?<![\w:.])({_NAME})\s*(?:\{{([^}}]*)\}}|(?!\s*\(|[\w:]))")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_WORDS = frozenset({"and", "or", "unless", "bool", "on", "by", "without", "ignoring", "inf", "nan"})


@attrs.frozen
class Matcher:
    label: str
    operator: str
    value: str


@attrs.frozen
class Selector:
    metric: str
    matchers: tuple[Matcher, ...]


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every metric that an expression selects, with the matchers of its labels."""
    bare = _RANGE.sub(" ", _GROUPED.sub(" ", expression))
    for name, inner in _SELECTED.findall(bare):
        if name not in _WORDS:
            yield Selector(name, tuple(Matcher(*found) for found in _MATCHER.findall(inner)))


def grouping_labels(expression: str) -> set[str]:
    """Return the labels that an expression aggregates or joins by."""
    return {label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",") if label.strip()}
