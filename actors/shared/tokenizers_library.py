"""The border to the `tokenizers` library: every call into it goes through here.

Used by `tokenizer/vocabulary.py`, `tokenizer/split_points.py`, `text_workers/encode_worker.py` and, for single tokens,
the detokenizer. Three things are kept from everybody else:

- `Tokenizer.encode` holds the interpreter lock for as long as it takes (4 s for 4 MB). The batch calls let go of it,
  and without offsets they take half the time and memory. Only those are used, a text at a time.
- The ids and offsets of an encoding are made while the lock is held: 40 ns an id, 200 ns an offset. So whoever encodes
  looks at the length first, and takes offsets one by one.
- A panic of the library is a BaseException, which would end the process: here it becomes a `LibraryPanic`, an error of
  the one request. Whatever else is no Exception (`trio.Cancelled`, KeyboardInterrupt) passes.

Batches would be spread over a pool of threads that all texts share, where a short one waits behind long ones. It is
turned off: each call runs in the thread that makes it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the library at every batch

_PANIC = "PanicException"
"""Its class cannot be imported: it is made by each Rust library for itself, in a module that does not exist."""


class LibraryPanic(Exception):
    """The library gave up on this text or these ids (a pattern that backtracks too far, for example)."""


@contextmanager
def catching_panics() -> Iterator[None]:
    """Turn a panic of Rust code into a LibraryPanic."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise LibraryPanic(str(error)) from None


class Library:
    """One tokenizer, read-only once it is loaded. Its methods may be called from several threads at once."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: bytes = b"") -> None:
        self.tokenizer = tokenizer
        """For what is asked of it once, at load."""
        self.source = source
        """The `tokenizer.json` that it was made of, for processes that need another: the file may change."""

    @classmethod
    def load(cls, source: bytes) -> Library:
        """Take a `tokenizer.json`. Raises Exception, as the library does."""
        with catching_panics():
            tokenizer = tokenizers.Tokenizer.from_buffer(source)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return cls(tokenizer, source)

    # ------------------------------------------------------------ to ids, as `encoder.EncodingBackend`

    def encode(self, text: str, *, most: int, add_special_tokens: bool = True) -> array[int] | int:
        encoding = self._encode(self.tokenizer.encode_batch_fast, text, add_special_tokens)
        return len(encoding) if len(encoding) > most else array("I", encoding.ids)

    def encode_with_starts(self, text: str, *, most: int) -> tuple[array[int], array[int]] | int:
        encoding = self._encode(self.tokenizer.encode_batch, text, add_special_tokens=True)
        if len(encoding) > most:
            return len(encoding)
        starts, before = array("I"), 0
        for token in range(len(encoding)):
            # what the tokenizer has added lies nowhere, and some say that a token begins after its own space
            start, end = encoding.token_to_chars(token) or (0, 0)
            starts.append(min(start, before) if start < end else before)
            before = max(before, end)
        return array("I", encoding.ids), starts

    def num_tokens_before(self, text: str, end: int) -> int:
        encoding = self._encode(self.tokenizer.encode_batch, text, add_special_tokens=False)
        for char in range(end, len(text)):
            token = encoding.char_to_token(char)
            if token is not None:  # characters that belong to no token are skipped
                return int(token)
        return len(encoding) if end else 0

    def list_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a short text. Raises LibraryPanic."""
        ids: list[int] = self._encode(self.tokenizer.encode_batch_fast, text, add_special_tokens).ids
        return ids

    def _encode(self, encode_batch: Any, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        with catching_panics():
            encodings: list[tokenizers.Encoding] = encode_batch([text], add_special_tokens=add_special_tokens)
            return encodings[0]

    def normalize(self, text: str) -> str:
        """`text` after the normalizer. Holds the interpreter lock: for short pieces. Raises LibraryPanic."""
        normalizer = self.tokenizer.normalizer
        if normalizer is None:
            return text
        with catching_panics():
            normalized: str = normalizer.normalize_str(text)
            return normalized

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a few ids. Raises LibraryPanic."""
        with catching_panics():
            text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text

    def name_of(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it."""
        with catching_panics():
            name: str | None = self.tokenizer.id_to_token(token_id)
            return name
