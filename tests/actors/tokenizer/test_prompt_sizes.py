"""Decisions that depend on the size of a prompt."""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.prompts import ChatPrompt, TextPrompt, TokenPrompt
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.tokenizer.prompt_sizes import INLINE_CHARACTERS, is_short


def test_is_short() -> None:
    """Only requests that take at most a few milliseconds are encoded on the event loop."""

    def fits(*prompts: Any, n: int = 1, bad_words: tuple[str, ...] = (), echo: bool = False) -> bool:
        request = Encode("r", prompts, n, 1, None, (), False, True, "", "", "", bad_words=bad_words, echo=echo)
        return is_short(request)

    assert fits(TextPrompt("x" * INLINE_CHARACTERS)) and fits(TokenPrompt((1,) * 16384))
    assert not fits(TextPrompt("x" * INLINE_CHARACTERS), TextPrompt("x"))
    assert not fits(TokenPrompt((1,) * 16385)) and not fits(TokenPrompt((1,) * 513), echo=True)
    assert not fits(ChatPrompt(({"role": "user", "content": "x"},))) and not fits(TextPrompt("x"), n=17)
    assert not fits(TextPrompt("x"), bad_words=("x" * INLINE_CHARACTERS,))
    assert not fits(TextPrompt("x"), bad_words=("x",) * 33)
