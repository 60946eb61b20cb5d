"""A checkpoint's tokenizer, as the tokenizer and the detokenizer use it, and the source of its chat template.

Loaded once by `wiring` and shared: read-only after that, and usable by several threads at once. Byte-level vocabularies
(Qwen, Llama 3, the demo) decode through a table of bytes; others through the tokenizer itself. Whatever grows with a
text is done where the interpreter lock is let go of, or in pieces (`library.py`): so it belongs into a thread.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import tokenizers

from quipu.actors.chat_template import RenderedChat, TemplateSource
from quipu.actors.checkpoint import CheckpointError
from quipu.actors.core.scribe import Spelling
from quipu.actors.core.segments import SegmentCache
from quipu.actors.core.text import ByteDecoder, TokenDecoder
from quipu.actors.core.text_bound import byte_alphabet, find_bound
from quipu.actors.library import Library
from quipu.actors.messages import Breakpoint, Mark, PromptText
from quipu.actors.seams import seams_of

COUNTED_FIRST_CHARACTERS = 1 << 19
"""A longer text is counted before it is encoded with offsets: the lock is held while an encoding is freed, and one with
offsets takes 100 ns a token."""
NO_LIMIT = 1 << 62
"""Tokens: any number of them will do."""


@attrs.frozen
class EncodedChat:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...]
    """One for each mark."""


@attrs.frozen
class EncodedText:
    token_ids: list[int]
    echo: PromptText | None = None
    """None: nobody asked, or it has no tokens."""


@attrs.frozen
class TooMany:
    """Tokens that a text has, where that is more than it may have: their ids are not taken out."""

    num_tokens: int
    is_exact: bool
    """Else it has at least so many: it was not tokenised."""


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies that are not byte-level name a single byte."""


class Vocabulary:
    """Text to ids and back, for one checkpoint."""

    def __init__(self, path: Path) -> None:
        """Load `tokenizer.json` and its companions from the folder `path`. Raises CheckpointError."""
        try:
            self.library = Library.load(path / "tokenizer.json")
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        config_path = path / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        self.template = _template_source(path, self._config)
        """None: it has no chat template."""
        parts: dict[str, Any] = json.loads(self.library.tokenizer.to_str())
        self._seams = seams_of(self.library, parts)
        self.bound = find_bound(parts, self.library.normalize)
        added = self.library.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._shown_table = _byte_table(self.library.tokenizer, parts, frozenset())
        self._hidden_table = _byte_table(self.library.tokenizer, parts, self._special_ids)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The library's own object, for whoever compares with it."""
        return self.library.tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds to one (a BOS, for some)."""
        ids: list[int] = self.library.encode(text).ids
        return ids

    def encode_text(self, text: str, *, most: int, with_echo: bool = False) -> EncodedText | TooMany:
        """Encode a plain prompt of at most `most` tokens; `with_echo`: with what it takes to give it back.

        Raises LibraryPanic.
        """
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        if with_echo and len(text) > COUNTED_FIRST_CHARACTERS:
            counted = self.count(text, most=most)
            if isinstance(counted, TooMany):
                return counted
        encoding = self.library.encode_with_offsets(text) if with_echo else self.library.encode(text)
        if len(encoding) > most:
            return TooMany(len(encoding), is_exact=True)
        ids: list[int] = encoding.ids
        return EncodedText(ids, _echo(text, ids, encoding) if with_echo and ids else None)

    def count(self, text: str, *, most: int) -> int | TooMany:
        """How many tokens a plain text has. Raises LibraryPanic."""
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        num_tokens = len(self.library.encode(text))
        return num_tokens if num_tokens <= most else TooMany(num_tokens, is_exact=True)

    def told_by_length(self, text: str, *, most: int) -> TooMany | None:
        """Whether the length alone says that a text has more than `most` tokens."""
        num_tokens = self.bound.told_by_length(text, _hopeless(most))
        return TooMany(num_tokens, is_exact=False) if num_tokens else None

    def longest_chat(self, *, most: int) -> int | None:
        """Characters from which on any rendered chat has more than `most` tokens; None: that cannot be told."""
        return self.bound.most_characters(_hopeless(most))

    def encode_chat(
        self,
        rendered: RenderedChat,
        marks: Sequence[Mark] = (),
        cache: SegmentCache | None = None,
        owner: str = "",
        *,
        most: int = NO_LIMIT,
    ) -> EncodedChat | TooMany:
        """Encode a rendered chat of at most `most` tokens. Raises LibraryPanic.

        What `owner` has put into `cache` with the turns before is not tokenised again; the ids are the same.
        """
        text = rendered.text
        if (num_tokens := self.bound.num_tokens(text, _hopeless(most))) > 0:
            return TooMany(num_tokens, is_exact=False)
        starts = self._seams.starts(text)
        token_ids: array[int] = array("I")
        num_tokens = 0
        first_tokens = []
        for start, end in pairwise([*starts, len(text)]):
            first_tokens.append(num_tokens)
            # the last segment is about to grow: nobody will ask for it as it is now
            num_tokens += self._take_ids(
                text[start:end], cache if end < len(text) else None, owner, token_ids, most - num_tokens
            )
        if num_tokens > most:
            return TooMany(num_tokens, is_exact=True)

        def num_tokens_before(end: int) -> int:
            """Tokens that lie wholly in the first `end` characters."""
            index = bisect_right(starts, end) - 1
            start, num_before = starts[index], first_tokens[index]
            if end == start:
                return num_before
            part = text[start : starts[index + 1]] if index + 1 < len(starts) else text[start:]
            encoding = self.library.encode_with_offsets(part, add_special_tokens=False)
            return num_before + _num_tokens_before(encoding, end - start, len(part))

        positions = map(num_tokens_before, rendered.mark_ends)
        breakpoints = tuple(Breakpoint(at, mark.ttl) for at, mark in zip(positions, marks, strict=True))
        return EncodedChat(token_ids.tolist(), breakpoints)

    def _take_ids(self, segment: str, cache: SegmentCache | None, owner: str, token_ids: array[int], most: int) -> int:
        """Put a segment's ids behind `token_ids`, unless they are more than `most`. Returns how many they are."""
        ids = None if cache is None else cache.find(owner, segment)
        if ids is None:
            encoding = self.library.encode(segment, add_special_tokens=False)
            if len(encoding) > most:
                return len(encoding)
            ids = array("I", encoding.ids)
            if cache is not None:
                cache.keep(owner, segment, ids)
        if len(ids) <= most:
            token_ids += ids
        return len(ids)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word as it stands at the beginning of a text, and after a space."""
        bare = word.lstrip()
        plain, spaced = (tuple(self.library.encode(text, add_special_tokens=False).ids) for text in (bare, f" {bare}"))
        # where the spaced one ends with the other, that one bans both
        return [ids for ids in (plain, spaced) if ids and (ids is plain or spaced[-len(plain) :] != plain)]

    def read_back(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> PromptText:
        """The text of a prompt that came as ids."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens, prompt_tail=())
        offsets, pieces, num_characters = [], [], 0
        for token_id in token_ids:
            offsets.append(num_characters)
            pieces.append(decoder.push(token_id))
            num_characters += len(pieces[-1])
        return PromptText("".join(pieces) + decoder.flush(), token_ids[0], tuple(offsets))

    def spell(self, token_id: int) -> Spelling:
        """A token by itself, special ones too; nothing for an id that the vocabulary does not have."""
        table = self._shown_table
        if table is not None:
            utf8 = table[token_id] if token_id < len(table) else b""
            return Spelling(utf8.decode("utf-8", "replace"), utf8)
        byte = _BYTE_TOKEN.fullmatch(self.library.name_of(token_id) or "")
        text = self.library.decode([token_id], skip_special_tokens=False)
        return Spelling(text, bytes.fromhex(byte[1]) if byte else text.encode())

    def decoder(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> TokenDecoder:
        """A decoder for one sequence's outputs."""
        table = self._hidden_table if skip_special_tokens else self._shown_table
        if table is not None:
            return ByteDecoder(table)
        return WindowDecoder(self.library, prompt_tail, skip_special_tokens=skip_special_tokens)


class WindowDecoder:
    """For tokenizers whose pieces depend on their neighbours: decodes a short window twice and takes the difference."""

    WINDOW = 8
    MAX_OPEN = 32
    """Tokens that may wait for the rest of a character: none takes so many, and each is decoded with all of them."""

    def __init__(self, library: Library, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._library = library
        self._skip = skip_special_tokens
        self._done = list(context[-self.WINDOW :])
        self._open: list[int] = []

    def push(self, token_id: int) -> str:
        self._open.append(token_id)
        text = self._difference()
        is_long = len(self._open) >= self.MAX_OPEN
        if text.endswith("�") and not is_long:
            return ""  # perhaps half a character; kept until more comes, or `flush`
        if text:
            self._done = (self._done + self._open)[-self.WINDOW :]
        if text or is_long:  # so many that show nothing are hidden ones
            self._open = []
        return text

    def flush(self) -> str:
        text = self._difference()
        self._open = []
        return text

    def _difference(self) -> str:
        before: str = self._library.decode(self._done, skip_special_tokens=self._skip)
        both: str = self._library.decode(self._done + self._open, skip_special_tokens=self._skip)
        return both[len(before) :]


def _hopeless(most: int) -> int:
    """Tokens from which on a text of at most `most` is refused untokenised: with some to spare for rounding."""
    return most + 3


def _echo(text: str, ids: Sequence[int], encoding: tokenizers.Encoding) -> PromptText:
    """What it takes to give a prompt back."""
    offsets, before = [], 0
    for token in range(len(ids)):
        # what the tokenizer has added lies nowhere, and some say that a token begins after its own space
        start, end = encoding.token_to_chars(token) or (0, 0)
        offsets.append(min(start, before) if start < end else before)
        before = max(before, end)
    return PromptText(text, ids[0], tuple(offsets))


def _num_tokens_before(encoding: tokenizers.Encoding, end: int, length: int) -> int:
    """Tokens that lie wholly in the first `end` characters of an encoded text of `length`."""
    for char in range(end, length):
        token = encoding.char_to_token(char)
        if token is not None:  # characters that belong to no token are skipped
            return int(token)
    return len(encoding.ids) if end else 0


def _byte_table(
    tokenizer: tokenizers.Tokenizer, parts: Mapping[str, Any], hidden: frozenset[int]
) -> list[bytes] | None:
    """Bytes of each id, or None where the vocabulary is not byte-level."""
    if (parts["decoder"] or {}).get("type") != "ByteLevel":
        return None
    byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id in hidden:
            continue
        if token_id in added:
            table[token_id] = added[token_id].content.encode()
        elif all(char in byte_of for char in token):
            table[token_id] = bytes(byte_of[char] for char in token)
        else:
            return None
    return table


def _template_source(path: Path, config: Mapping[str, Any]) -> TemplateSource | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if source is None:
        return None
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := config.get(name)) is not None
    }
    return TemplateSource(str(path), source, special)


__all__ = ["EncodedChat", "EncodedText", "TooMany", "Vocabulary", "WindowDecoder"]
