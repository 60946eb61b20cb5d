"""Decisions that depend on the size of a prompt."""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.prompts import ChatPrompt, InfillPrompt, TextPrompt, TokenPrompt
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.tokenizer.prompt_sizes import INLINE_CHARACTERS, is_short, num_bytes_to_encode


def test_is_short() -> None:
    """Only requests that take at most a few milliseconds are encoded on the event loop."""

    def fits(*prompts: Any, n: int = 1, bad_words: tuple[str, ...] = (), echo: bool = False) -> bool:
        request = Encode("r", prompts, n, 1, None, (), False, True, "", "", "", bad_words=bad_words, echo=echo)
        return is_short(request)

    assert fits(TextPrompt("x" * INLINE_CHARACTERS)) and fits(TokenPrompt((1,) * 16384))
    assert not fits(TextPrompt("x" * INLINE_CHARACTERS), TextPrompt("x"))
    half = "x" * (INLINE_CHARACTERS // 2)
    assert fits(InfillPrompt(half, half, "suffix")) and not fits(InfillPrompt(half, f"{half}x", "suffix"))
    assert not fits(TokenPrompt((1,) * 16385)) and not fits(TokenPrompt((1,) * 513), echo=True)
    assert not fits(ChatPrompt(({"role": "user", "content": "x"},))) and not fits(TextPrompt("x"), n=17)
    assert not fits(TextPrompt("x"), bad_words=("x" * INLINE_CHARACTERS,))
    assert not fits(TextPrompt("x"), bad_words=("x",) * 33)


def test_bytes_of_gaps() -> None:
    """Both texts count, for the queue that a request enters."""
    half = "x" * INLINE_CHARACTERS
    assert num_bytes_to_encode((InfillPrompt(half, "", "suffix"),), (), echo=False) == 0
    assert num_bytes_to_encode((InfillPrompt(half, half, "suffix"),), (), echo=False) == 2 * len(half)
