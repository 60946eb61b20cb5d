"""From token ids to text, for one checkpoint's vocabulary.

`wiring.py` loads one `Decoder`, which the detokenizer uses for outputs, and the tokenizer for echoing prompts of ids.
It is read-only, and several threads may use it at once. Byte-level vocabularies (Qwen, Llama 3, the demo) are decoded
through a table of bytes, all others by the tokenizers library.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import tokenizers

from ..shared.token_decoding import TokenDecoder, TokenText, byte_alphabet
from ..shared.tokenizers_library import Library

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies that are not byte-level name a single byte."""


class Decoder:
    def __init__(self, library: Library) -> None:
        self._library = library
        added = library.tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._full_table = _byte_table(library.tokenizer, frozenset())
        self._table_without_special = _byte_table(library.tokenizer, special_ids)

    def make_decoder(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> TokenDecoder:
        """Return a decoder for one sequence, whose tokens follow `prompt_tail`."""
        table = self._table_without_special if skip_special_tokens else self._full_table
        if table is not None:
            return ByteDecoder(table)
        return WindowDecoder(self._library, prompt_tail, skip_special_tokens=skip_special_tokens)

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; an unused id has an empty name. Raises LibraryPanic."""
        return [self._library.name_of(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> TokenText:
        """Decode one token by itself, special tokens included; an id without a token has an empty text.

        Raises LibraryPanic.
        """
        table = self._full_table
        if table is not None:
            utf8 = table[token_id] if token_id < len(table) else b""
            return TokenText(utf8.decode("utf-8", "replace"), utf8)
        byte = _BYTE_TOKEN.fullmatch(self._library.name_of(token_id) or "")
        text = self._library.decode([token_id], skip_special_tokens=False)
        return TokenText(text, bytes.fromhex(byte[1]) if byte else text.encode())


class ByteDecoder:
    """Decode byte-level vocabularies with a table of each token's bytes and an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table[token_id]` holds the token's bytes, and is empty for a hidden token."""
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        table = self._table
        return self._decode(table[token_id]) if token_id < len(table) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDecoder:
    """Decode vocabularies whose tokens depend on their neighbours.

    A short window of tokens is decoded with and without the new tokens; the difference is the new text. The library
    decodes adjacent tokens of single bytes together, and if one character of them is cut, all become U+FFFD. So
    those of earlier characters are not part of the window, unless nothing else has a text.
    """

    WINDOW = 8
    MAX_PENDING = 32
    """The most tokens held back for an incomplete character: more than any character has. Each push decodes all."""

    def __init__(self, library: Library, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._library = library
        self._skip = skip_special_tokens
        self._context = self._without_bytes(context)[-self.WINDOW :]
        self._pending: list[int] = []
        if not self._decoded(self._context):
            self._context = list(context[-self.WINDOW :])
            while self._decoded(self._context).startswith("�"):  # it begins within a character
                del self._context[0]

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        is_full = len(self._pending) >= self.MAX_PENDING
        if text.endswith("�") and not is_full:
            return ""  # perhaps half a character: wait for more tokens, or for `flush`
        if text:
            self._remember(self._pending)
        if text or is_full:  # that many tokens without any text are hidden ones
            self._pending = []
        return text

    def flush(self) -> str:
        text = self._pending_text()
        self._pending = []
        return text

    def _pending_text(self) -> str:
        return self._decoded(self._context + self._pending)[len(self._decoded(self._context)) :]

    def _remember(self, token_ids: list[int]) -> None:
        """Add tokens whose text was released to the window."""
        others = self._without_bytes(token_ids)
        if len(others) == len(token_ids):
            self._context = (self._context + token_ids)[-self.WINDOW :]
            return
        before = self._decoded(self._context)
        for kept in (others, token_ids):
            if self._decoded(self._context + kept) != before:
                self._context = (self._context + kept)[-self.WINDOW :]
                return
            if before:
                return

    def _without_bytes(self, token_ids: Sequence[int]) -> list[int]:
        return [i for i in token_ids if not _BYTE_TOKEN.fullmatch(self._library.name_of(i) or "")]

    def _decoded(self, token_ids: list[int]) -> str:
        return self._library.decode(token_ids, skip_special_tokens=self._skip)


def _byte_table(tokenizer: tokenizers.Tokenizer, hidden: frozenset[int]) -> list[bytes] | None:
    """Return the bytes of each token by id, or None if the vocabulary is not byte-level."""
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        return None
    # of what is left as it is, or becomes U+FFFF, no token is made
    letters = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for byte, char in enumerate(byte_alphabet())}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id in hidden:
            continue
        if token_id in added:
            table[token_id] = added[token_id].content.encode()
            continue
        try:
            table[token_id] = token.translate(letters).encode("latin1")
        except UnicodeEncodeError:
            return None
    return table
