"""Converts JSON Schema's `pattern`, which may match anywhere, to one that matches a whole text, as the lexer expects.

Used for strings that a model does not write as JSON (`text_values.py`); within JSON the grammar library does the same.
What must always hold: the result can stand between slashes in a grammar, and contains none that would end it.
"""

from __future__ import annotations

from .pattern_groups import UnsupportedPattern
from .schema_patterns import library_pattern

MAX_PATTERN_CHARS = 4096
GROUP = "(?:"
"""Begins a client's pattern, and nothing else in the result."""
_ANYTHING = "(?s:.*)"
_SET_OPERATIONS = ("&&", "--", "~~")
"""Of the library, in a class of characters; in JSON Schema they are plain characters."""


def whole_pattern(pattern: object) -> str | None:
    """Return a pattern for texts in which `pattern` is found, or None if it is not supported.

    Not supported are word boundaries, look-around, back-references, and anchors except at the ends of a pattern without
    alternatives outside groups. The library itself refuses everything else that it does not know.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        return None
    parts: list[str] = []
    anchors: list[int] = []
    depth, at, in_class, has_alternatives = 0, 0, False, False
    while at < len(pattern):
        char = pattern[at]
        part = pattern[at : at + 2] if char == "\\" else char
        if part == "\\" or (char == "\\" and part[1] in "123456789kbBAzZG"):
            return None
        if in_class:
            if pattern.startswith(_SET_OPERATIONS, at):
                return None
            in_class = part != "]"
            part = "\\[" if part == "[" else part
        elif part == "[":
            in_class = True
            part = "[^" if pattern.startswith("[^", at) else "["
            if pattern.startswith("]", at + len(part)):  # engines read this differently
                return None
        elif part == "(":
            if pattern.startswith("(?", at) and not pattern.startswith("(?:", at):
                return None
            depth += 1
        elif part == ")":
            depth -= 1
            if depth < 0:
                return None
        elif part in ("^", "$"):
            anchors.append(at)
        has_alternatives |= part == "|" and depth == 0 and not in_class
        at += 2 if part == "[^" else 1 if part == "\\[" else len(part)
        parts.append("\\/" if part == "/" else "\\n" if part == "\n" else part)
    begins, ends = pattern.startswith("^"), bool(anchors) and anchors[-1] == len(pattern) - 1 and pattern.endswith("$")
    if depth or in_class or len(anchors) != begins + ends or (anchors and has_alternatives):
        return None
    try:
        core = library_pattern("".join(parts[begins : len(parts) - ends]))
    except UnsupportedPattern:
        return None
    return f"{'' if begins else _ANYTHING}{GROUP}{core}){'' if ends else _ANYTHING}"
