"""The demo's tokenizer, and how chats become rows of token ids to train on.

A byte-level BPE with Qwen's way of splitting text (every digit is a token), trained on generated chats and on the
docstrings of Python's standard library (copyright Python Software Foundation; the PSF licence permits this), so that
text from outside the generated world has about three characters a token, not one.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from random import Random

import jinja2.sandbox
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .text.chat_mixture import draw_document_chat, draw_short_chat
from .text.chats import Chat
from .text.repetition import WORDS

CHECKPOINT = Path(__file__).parent / "checkpoint"
VOCAB_SIZE = 3072
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that are not skipped as special when text is decoded, as in Qwen3."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCSTRING_MODULES = (
    "argparse", "asyncio", "collections", "contextlib", "dataclasses", "datetime", "decimal", "difflib", "email",
    "enum", "fractions", "functools", "heapq", "inspect", "json", "logging", "pathlib", "random", "statistics",
    "subprocess", "textwrap", "threading", "typing", "unittest", "urllib.request",
)  # fmt: skip


def docstrings() -> list[str]:
    """Return the docstrings of some standard library modules, in a fixed order."""
    texts: list[str | None] = []
    for name in DOCSTRING_MODULES:
        module = importlib.import_module(name)
        members = [module, *(member for _, member in sorted(vars(module).items()) if callable(member))]
        texts += map(inspect.getdoc, members)
    return [text for text in texts if text]


def train_tokenizer(seed: int = 0, num_chats: int = 20_000) -> Tokenizer:
    """Train the tokenizer: every text round-trips, and the words of the generated world are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_chats), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def _texts(seed: int, num_chats: int) -> Iterator[str]:
    random = Random(seed)
    for index in range(num_chats):
        chat = draw_document_chat(random, 12) if index % 8 == 0 else draw_short_chat(random)
        for message in chat.messages:
            yield message["content"]
            yield json.dumps(message.get("tool_calls", ""))
        yield "\n".join(map(json.dumps, chat.tools))
    yield from docstrings() * 3
    for word in WORDS:
        yield from [f'{word} {word} "{word}"'] * 400


class ChatEncoder:
    def __init__(self, folder: Path = CHECKPOINT) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text("utf-8"))

    def token_id(self, token: str) -> int:
        """Return the id of one of `SPECIAL_TOKENS` or `MARKERS`."""
        token_id = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return token_id

    @cached_property
    def _header(self) -> list[int]:
        return list(self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids)

    @cached_property
    def _no_thoughts(self) -> list[int]:
        return list(self.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False).ids)

    def render(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        return self._template.render(
            messages=chat.messages, tools=chat.tools or None, enable_thinking=chat.thinking,
            add_generation_prompt=add_generation_prompt,
        )  # fmt: skip

    def encode(self, chat: Chat) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the chat's token ids (N,), and which of them (N,) the model has to write itself."""
        ids = self.tokenizer.encode(self.render(chat), add_special_tokens=False).ids
        written = np.zeros(len(ids), dtype=np.bool_)
        end = self.token_id("<|im_end|>")
        position = 0
        while position < len(ids):
            if ids[position : position + len(self._header)] != self._header:
                position += 1
                continue
            position += len(self._header)
            if ids[position : position + len(self._no_thoughts)] == self._no_thoughts:
                position += len(self._no_thoughts)
            stop = ids.index(end, position) + 1
            written[position:stop] = True
            position = stop
        return np.asarray(ids, dtype=np.int64), written
