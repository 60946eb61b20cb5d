"""A checkpoint's tokenizer and chat template, as the tokenizer and the detokenizer use them.

Loaded once by `wiring` and shared: read-only after that. Byte-level vocabularies (Qwen, Llama 3, the demo) decode
through a table of bytes; others through the tokenizer itself.
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
import jinja2
import tokenizers

from quipu.actors.chat_template import ChatTemplate, RenderedChat, TemplateError
from quipu.actors.checkpoint import CheckpointError
from quipu.actors.core.scribe import Spelling
from quipu.actors.core.segments import SegmentCache
from quipu.actors.core.text import ByteDecoder, TokenDecoder
from quipu.actors.messages import Breakpoint, ChatPrompt, PromptText
from quipu.actors.seams import find_seams


@attrs.frozen
class EncodedChat:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...]
    """One for each mark."""


@attrs.frozen
class EncodedText:
    token_ids: list[int]
    echo: PromptText | None
    """None: it has no tokens."""


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies that are not byte-level name a single byte."""


class Vocabulary:
    """Text to ids and back, for one checkpoint."""

    def __init__(self, path: Path) -> None:
        """Load `tokenizer.json` and its companions from the folder `path`. Raises CheckpointError."""
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        config_path = path / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        self._template = _load_template(path, self._config)
        self._seams = find_seams(self.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._shown_table = _byte_table(self.tokenizer, frozenset())
        self._hidden_table = _byte_table(self.tokenizer, self._special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds to one (a BOS, for some)."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def render_chat(self, chat: ChatPrompt) -> RenderedChat:
        """A chat's text, through the chat template. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(chat)

    def encode_chat(self, chat: ChatPrompt, cache: SegmentCache | None = None, owner: str = "") -> EncodedChat:
        """Ids of a chat, rendered. Raises TemplateError.

        What `owner` has put into `cache` with the turns before is not tokenised again; the ids are the same.
        """
        rendered = self.render_chat(chat)
        text = rendered.text
        starts = self._seams.starts(text)
        token_ids: array[int] = array("I")
        first_tokens = []
        for start, end in pairwise([*starts, len(text)]):
            first_tokens.append(len(token_ids))
            # the last segment is about to grow: nobody will ask for it as it is now
            token_ids += self._ids_of(text[start:end], cache if end < len(text) else None, owner)

        def num_tokens_before(end: int) -> int:
            """Tokens that lie wholly in the first `end` characters."""
            index = bisect_right(starts, end) - 1
            start, num_before = starts[index], first_tokens[index]
            if end == start:
                return num_before
            part = text[start : starts[index + 1]] if index + 1 < len(starts) else text[start:]
            encoding = self.tokenizer.encode(part, add_special_tokens=False)
            return num_before + _num_tokens_before(encoding, end - start, len(part))

        positions = map(num_tokens_before, rendered.mark_ends)
        breakpoints = tuple(Breakpoint(at, mark.ttl) for at, mark in zip(positions, chat.marks, strict=True))
        return EncodedChat(token_ids.tolist(), breakpoints)

    def _ids_of(self, segment: str, cache: SegmentCache | None, owner: str) -> array[int]:
        ids = None if cache is None else cache.find(owner, segment)
        if ids is None:
            ids = array("I", self.tokenizer.encode(segment, add_special_tokens=False).ids)
            if cache is not None:
                cache.keep(owner, segment, ids)
        return ids

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word as it stands at the beginning of a text, and after a space."""
        bare = word.lstrip()
        plain, spaced = (
            tuple(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in (bare, f" {bare}")
        )
        # where the spaced one ends with the other, that one bans both
        return [ids for ids in (plain, spaced) if ids and (ids is plain or spaced[-len(plain) :] != plain)]

    def encode_for_echo(self, text: str) -> EncodedText:
        """As `encode`, with what it takes to give the prompt back."""
        encoding = self.tokenizer.encode(text)
        offsets, before = [], 0
        for start, end in encoding.offsets:
            # what the tokenizer has added lies nowhere, and some say that a token begins after its own space
            offsets.append(min(start, before) if start < end else before)
            before = max(before, end)
        return EncodedText(encoding.ids, PromptText(text, encoding.ids[0], tuple(offsets)) if offsets else None)

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
        byte = _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "")
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return Spelling(text, bytes.fromhex(byte[1]) if byte else text.encode())

    def decoder(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> TokenDecoder:
        """A decoder for one sequence's outputs."""
        table = self._hidden_table if skip_special_tokens else self._shown_table
        if table is not None:
            return ByteDecoder(table)
        return WindowDecoder(self.tokenizer, prompt_tail, skip_special_tokens=skip_special_tokens)


class WindowDecoder:
    """For tokenizers whose pieces depend on their neighbours: decodes a short window twice and takes the difference."""

    WINDOW = 8

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._done = list(context[-self.WINDOW :])
        self._open: list[int] = []

    def push(self, token_id: int) -> str:
        self._open.append(token_id)
        text = self._difference()
        if text.endswith("�"):
            return ""  # perhaps half a character; kept until more comes, or `flush`
        if text:
            self._done = (self._done + self._open)[-self.WINDOW :]
            self._open = []
        return text

    def flush(self) -> str:
        text = self._difference()
        self._open = []
        return text

    def _difference(self) -> str:
        before: str = self._tokenizer.decode(self._done, skip_special_tokens=self._skip)
        both: str = self._tokenizer.decode(self._done + self._open, skip_special_tokens=self._skip)
        return both[len(before) :]


def _num_tokens_before(encoding: tokenizers.Encoding, end: int, length: int) -> int:
    """Tokens that lie wholly in the first `end` characters of an encoded text of `length`."""
    for char in range(end, length):
        token = encoding.char_to_token(char)
        if token is not None:  # characters that belong to no token are skipped
            return int(token)
    return len(encoding.ids) if end else 0


def _byte_table(tokenizer: tokenizers.Tokenizer, hidden: frozenset[int]) -> list[bytes] | None:
    """Bytes of each id, or None where the vocabulary is not byte-level."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    if decoder.get("type") != "ByteLevel":
        return None
    byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
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


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves, the others
    from U+0100 on (the mapping that GPT-2 introduced)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _load_template(path: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
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
    try:
        return ChatTemplate(source, special)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{path}: the chat template does not compile: {error}") from error


__all__ = ["EncodedChat", "TemplateError", "Vocabulary", "WindowDecoder"]
