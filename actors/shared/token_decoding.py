"""Interfaces for decoding token ids into text, and the byte alphabet of byte-level vocabularies.

`detokenizer/decoder.py` implements the interfaces. The tokenizer uses them to echo prompts that were sent as ids, and
the web layer uses `TokenText` for logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs


class TokenDecoder(Protocol):
    """Decodes the tokens of one sequence incrementally."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: often its own text, empty in the middle of a character."""

    def flush(self) -> str:
        """Return the remaining text at the end, with U+FFFD for an incomplete character."""


class Decoding(Protocol):
    """A checkpoint's vocabulary. Its methods raise LibraryPanic."""

    def make_decoder(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> TokenDecoder:
        """Return a decoder for one sequence, whose tokens follow `prompt_tail`."""

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; an unused id has an empty name."""


@attrs.frozen
class TokenText:
    """One token decoded by itself."""

    text: str
    utf8: bytes
    """The token's bytes, which may be only part of a character."""


TokenTextLookup = Callable[[int], TokenText]


def byte_alphabet() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary.

    Printable bytes represent themselves; the others are mapped to U+0100 and above (the mapping that GPT-2 introduced).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
