"""The groups of a pattern, and where in them its anchors stand.

The grammar library has no look-around, of which anchors are a kind: it knows `^` where nothing can come before it, and
`$` where nothing can follow. Used by `schema_patterns.py`. What must always hold: the library can follow a pattern that
is not refused here.
"""

from __future__ import annotations

import attrs

MAX_GROUPS = 64
"""Nesting depth."""


class UnsupportedPattern(ValueError):
    """The library interprets a pattern differently, or it is not an ECMA 262 pattern."""


@attrs.define
class _Group:
    begins: bool
    """Nothing comes before it."""
    has_text: bool = False
    """The current alternative is not empty."""
    has_ended: bool = False
    """The current alternative has a `$`."""
    may_have_ended: bool = False
    """Another alternative has."""
    has_anchor: bool = False


@attrs.define
class PatternGroups:
    """What was read so far, noted in order. Each method raises UnsupportedPattern."""

    _open: list[_Group] = attrs.field(factory=lambda: [_Group(begins=True)])
    _may_repeat: bool = False
    """A quantifier may come next."""
    has_anchor: bool = False
    has_alternatives: bool = False
    """Outside groups."""

    def text(self) -> None:
        """Note an atom that matches characters."""
        self._follow()
        self._may_repeat = True

    def open(self) -> None:
        if len(self._open) > MAX_GROUPS:
            raise UnsupportedPattern("too many groups within each other")
        group = self._open[-1]
        self._open.append(_Group(begins=group.begins and not group.has_text))
        self._may_repeat = False

    def mark(self, char: str) -> None:
        """Note an anchor, the end of an alternative or that of a group."""
        group = self._open[-1]
        self._may_repeat = False
        self.has_anchor |= char in "^$"
        self.has_alternatives |= char == "|" and len(self._open) == 1
        match char:
            case "^":
                if group.has_text or group.has_ended or not group.begins:
                    raise UnsupportedPattern("`^` behind something else")
                group.has_anchor = True
            case "$":
                group.has_ended = group.has_anchor = True
            case "|":
                group.may_have_ended |= group.has_ended
                group.has_text = group.has_ended = False
            case _:
                self._close()

    def quantifier(self) -> None:
        if not self._may_repeat:
            raise UnsupportedPattern("nothing that a quantifier could repeat")
        self._may_repeat = False

    def end(self) -> None:
        if len(self._open) > 1:
            raise UnsupportedPattern("an unclosed group")

    def _close(self) -> None:
        group = self._open.pop()
        if not self._open:
            raise UnsupportedPattern("a `)` that closes no group")
        self._follow()
        outer = self._open[-1]
        outer.has_ended = group.has_ended or group.may_have_ended
        outer.has_anchor |= group.has_anchor
        self._may_repeat = not group.has_anchor

    def _follow(self) -> None:
        group = self._open[-1]
        if group.has_ended:
            raise UnsupportedPattern("something behind `$`")
        group.has_text = True
