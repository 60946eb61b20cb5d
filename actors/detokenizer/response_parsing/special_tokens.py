"""Special tokens among the delimiters, represented as characters.

Decoded text never contains a lone surrogate. So each special token of a template gets two, one for a hidden and one for
a shown token, and the parser works on text alone. What must always hold: no such character leaves the parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs
import msgspec

from ...messages.output import OutputEvent
from .output_patterns import SPECIAL_END, SPECIAL_START, UnsupportedPattern

_SPECIAL = re.compile(f"[{SPECIAL_START}-{SPECIAL_END}]")
_MAX = (ord(SPECIAL_END) - ord(SPECIAL_START)) // 2


@attrs.frozen
class Stand:
    """The characters that represent one special token."""

    text: str
    hidden: str
    shown: str

    def replace(self, piece: str) -> str:
        """Return `piece`, with which the token came, with the token's representation at its end."""
        if piece.endswith(self.text):
            return piece[: len(piece) - len(self.text)] + self.shown
        return piece + self.hidden


class SpecialTokens:
    def __init__(self, ids: Mapping[str, int], texts: Iterable[str]) -> None:
        """`texts`: where special tokens may occur, the patterns of a template. Raises UnsupportedPattern."""
        joined = "\0".join(texts)
        used = sorted((text for text in ids if text and text in joined), key=lambda text: (-len(text), text))
        if len(used) > _MAX:
            raise UnsupportedPattern("so many special tokens in one template are not supported")
        first = ord(SPECIAL_START)
        stands = [Stand(text, chr(first + 2 * at), chr(first + 2 * at + 1)) for at, text in enumerate(used)]
        self.by_id = {ids[stand.text]: stand for stand in stands}
        self.by_text = {stand.text: frozenset((stand.hidden, stand.shown)) for stand in stands}
        self._texts = {ord(stand.hidden): "" for stand in stands} | {ord(stand.shown): stand.text for stand in stands}

    def shown(self, event: OutputEvent) -> OutputEvent:
        """Return the event with the texts of the special tokens in it."""
        changed = {
            field: value.translate(self._texts)
            for field in ("text", "source")
            if field in event.__struct_fields__ and _SPECIAL.search(value := getattr(event, field))
        }
        return msgspec.structs.replace(event, **changed) if changed else event


def is_special(text: str) -> bool:
    return _SPECIAL.search(text) is not None
