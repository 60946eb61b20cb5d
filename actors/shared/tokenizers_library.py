"""The only place that calls the `tokenizers` library.

Used by `tokenizer/` and `detokenizer/`, and by the processes that encode long texts (`text_workers/encode_worker.py`).
Three properties of the library are hidden from everybody else:

- `Tokenizer.encode` holds the GIL for as long as it takes (4 s for 4 MB). The batch methods release it, and without
  offsets they need half the time and memory. Only those are used, with one text at a time.
- The ids and offsets of an encoding are converted while the GIL is held: 40 ns per id, 200 ns per offset. So callers
  look at the length first, and offsets are taken one by one.
- A panic in the library's Rust code is a BaseException, which would end the process; its errors are bare Exceptions.
  Here they become a `LibraryPanic`, which fails one request. Every other exception (`trio.Cancelled`, MemoryError)
  passes through.

The library would spread batches over a thread pool shared by all texts, in which a short text waits behind long ones.
That is turned off: each call runs in the calling thread.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import tokenizers

from .added_tokens import SpecialTokens, Token, read_special_tokens
from .checkpoint import CheckpointError

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library reads it for every batch

_PANIC = "PanicException"
"""The class cannot be imported: each Rust library defines its own, in a module that does not exist."""
_MAX_TOKEN_IDS = 1 << 24
"""The decoder's tables have an entry for every id up to the largest, whether or not the vocabulary uses it."""


NO_TEXT = "lone surrogates are no text"


class LibraryPanic(Exception):
    """The library failed on this text or these ids (for example, a pattern backtracked too often)."""


@contextmanager
def catching_panics() -> Iterator[None]:
    """Convert a panic in Rust code, or an error of it, into a LibraryPanic."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        raise LibraryPanic(str(error)) from None


@contextmanager
def _refusing_surrogates() -> Iterator[None]:
    """Convert what the library raises for a Python string that is no text, with half a character, to a LibraryPanic."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        raise LibraryPanic(NO_TEXT) from None


class Library:
    """One tokenizer. It is read-only once loaded, and several threads may call its methods at once."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: bytes = b"") -> None:
        self.tokenizer = tokenizer
        """The library's object, for what is read from it once, at startup."""
        self.source = source
        """The `tokenizer.json` that it stands for, for processes that load another: the file may change on disk."""
        self.max_token_id = 0
        """Its largest id, if it is a checkpoint's. The model may have fewer."""

    @classmethod
    def load(cls, source: bytes) -> Library:
        """Load the contents of a `tokenizer.json`. Raises LibraryPanic."""
        with catching_panics():
            tokenizer = tokenizers.Tokenizer.from_buffer(source)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return cls(tokenizer, source)

    def with_tokens(self, special: SpecialTokens) -> Library:
        """Return the tokenizer that the checkpoint's other files make of this one. Raises as `load` does."""
        with catching_panics():
            known = {number: _token_of(added) for number, added in self.tokenizer.get_added_tokens_decoder().items()}
            wanted = special.to_add(known)
            if not wanted:
                return self
            tokenizer = tokenizers.Tokenizer.from_buffer(self.source)
            tokenizer.add_tokens([tokenizers.AddedToken(**attrs.asdict(token)) for token in wanted])
            # not this object: the library forgets some flags of tokens that were there before, until it is loaded anew
            return self.load(tokenizer.to_str().encode())

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> array[int] | int:
        encoding = self._encode(self.tokenizer.encode_batch_fast, text, add_special_tokens)
        return len(encoding) if len(encoding) > max_tokens else array("I", encoding.ids)

    def encode_with_starts(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True
    ) -> tuple[array[int], array[int]] | int:
        encoding = self._encode(self.tokenizer.encode_batch, text, add_special_tokens)
        if len(encoding) > max_tokens:
            return len(encoding)
        starts, before = array("I"), 0
        for token in range(len(encoding)):
            # tokens that the tokenizer added have no place in the text; some tokenizers start a token after its space
            start, end = encoding.token_to_chars(token) or (0, 0)
            starts.append(min(start, before) if start < end else before)
            before = max(before, end)
        return array("I", encoding.ids), starts

    def num_tokens_before(self, text: str, end: int) -> int:
        encoding = self._encode(self.tokenizer.encode_batch, text, add_special_tokens=False)
        for char in range(end, len(text)):
            token = encoding.char_to_token(char)
            if token is not None:  # skip characters that belong to no token
                return int(token)
        return len(encoding) if end else 0

    def list_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a short text. Raises LibraryPanic."""
        ids: list[int] = self._encode(self.tokenizer.encode_batch_fast, text, add_special_tokens).ids
        return ids

    def _encode(self, encode_batch: Any, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        with catching_panics(), _refusing_surrogates():
            encodings: list[tokenizers.Encoding] = encode_batch([text], add_special_tokens=add_special_tokens)
            return encodings[0]

    def normalize(self, text: str) -> str:
        """Apply the normalizer to a short text. This holds the GIL. Raises LibraryPanic."""
        normalizer = self.tokenizer.normalizer
        if normalizer is None:
            return text
        with catching_panics(), _refusing_surrogates():
            normalized: str = normalizer.normalize_str(text)
            return normalized

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a few ids. Raises LibraryPanic."""
        with catching_panics():
            text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text

    def name_of(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, None for an unused id. Raises LibraryPanic."""
        with catching_panics():
            name: str | None = self.tokenizer.id_to_token(token_id)
            return name


def load_library(folder: Path) -> Library:
    """Load the tokenizer in a checkpoint's folder: tokenizer.json, and the files beside it. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    special = read_special_tokens(folder)
    try:
        library = Library.load(path.read_bytes()).with_tokens(special)
    except Exception as error:  # of whatever type the library raises
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    library.max_token_id = max(library.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= library.max_token_id < _MAX_TOKEN_IDS:
        raise CheckpointError(f"{path}: token ids must be less than {_MAX_TOKEN_IDS}")
    return library


def _token_of(added: tokenizers.AddedToken) -> Token:
    return Token(added.content, added.single_word, added.lstrip, added.rstrip, added.normalized, added.special)
