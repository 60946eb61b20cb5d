"""A checkpoint's tokenizer, as the tokenizer and the detokenizer use it, and the source of its chat template.

Loaded once by `wiring` and shared: read-only after that, and usable by several threads at once. Byte-level vocabularies
(Qwen, Llama 3, the demo) decode through a table of bytes; others through the tokenizer itself. Whatever grows with a
text is done where the interpreter lock is let go of, or in pieces (`shared/tokenizers_library.py`): so it belongs into
a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..detokenizer.logprob_assembler import Spelling
from ..detokenizer.text_stream import ByteDecoder, TokenDecoder
from ..messages.prompts import PromptText
from ..shared.checkpoint import CheckpointError, read_json
from ..shared.tokenizers_library import Library, LibraryPanic
from .chat_template import TemplateSource
from .encoder import TextEncoder
from .split_points import seams_of
from .text_bound import byte_alphabet, find_bound

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies that are not byte-level name a single byte."""


_MOST_IDS = 1 << 24
"""There is a table with a place for each id, whether the vocabulary has it or not."""


class Vocabulary:
    """Text to ids and back, for one checkpoint."""

    def __init__(self, path: Path) -> None:
        """Load `tokenizer.json` and its companions from the folder `path`. Raises CheckpointError."""
        try:
            self.library = Library.load((path / "tokenizer.json").read_bytes())
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        config_path = path / "tokenizer_config.json"
        self.template = _template_source(path, read_json(config_path) if config_path.exists() else {})
        """None: it has no chat template."""
        vocabulary = self.library.tokenizer.get_vocab(with_added_tokens=True)
        if not 0 <= max(vocabulary.values(), default=-1) < _MOST_IDS:
            raise CheckpointError(f"{path / 'tokenizer.json'}: the ids of its vocabulary go up to {_MOST_IDS - 1}")
        parts: dict[str, Any] = json.loads(self.library.tokenizer.to_str())
        try:
            bound, seams = find_bound(parts, self.library.normalize), seams_of(self.library, parts)
        except LibraryPanic as error:
            raise CheckpointError(f"{path / 'tokenizer.json'} cannot be used: {error}") from error
        self.encoder = TextEncoder(self.library, bound, seams)
        """For short texts: it encodes in this process."""
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
        return self.library.list_ids(text)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word as it stands at the beginning of a text, and after a space."""
        bare = word.lstrip()
        plain, spaced = (tuple(self.library.list_ids(text, add_special_tokens=False)) for text in (bare, f" {bare}"))
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
    """Raises CheckpointError naming the entry that is no template, or no token."""
    file = path / "chat_template.jinja"
    try:
        source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if isinstance(source, list):  # several, by name
        if not all(isinstance(one, dict) for one in source):
            raise CheckpointError("tokenizer_config.json: chat_template is a list of something other than objects")
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("tokenizer_config.json: chat_template is neither a text nor a list of named ones")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
        elif value is not None:
            raise CheckpointError(f"tokenizer_config.json: {name} is neither a text nor an object with its `content`")
    return TemplateSource(str(path), source, special)


__all__ = ["Vocabulary", "WindowDecoder"]
