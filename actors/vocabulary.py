"""A checkpoint's tokenizer and chat template, as the tokenizer and the detokenizer use them.

Loaded once by `wiring` and shared: read-only after that. Byte-level vocabularies (Qwen, Llama 3, the demo) decode
through a table of bytes; others through the tokenizer itself.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from quipu.actors.checkpoint import CheckpointError
from quipu.actors.core.text import ByteDecoder, TokenDecoder


class TemplateError(ValueError):
    """The chat template refused the messages, or there is none; the message is for the client."""


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
        self._template = _compile_template(path, self._config)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._shown_table = _byte_table(self.tokenizer, frozenset())
        self._hidden_table = _byte_table(self.tokenizer, self._special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds to one (a BOS, for some)."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Ids of messages rendered through the chat template. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := self._config.get(name)) is not None
        }
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **{**special, **template_kwargs}
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

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


def _compile_template(path: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if source is None:
        return None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)  # noqa: DTZ005 -- templates mean the local date

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{path}: the chat template does not compile: {error}") from error
