"""Prompts for shared servers: prompts of different tags share no prefix, so only a test itself warms its cache."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.fake_oracle import continuation
from tests.runtimes import text_of
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

_WORDS = "the list method returns a new object that sorts every item in place when its key is given as second argument"

vocabulary = Vocabulary(TINY)
"""The tiny model's, which is also used with the fake executor."""


def text_prompt(tag: str, num_words: int) -> str:
    """Return random words seeded by `tag`; a longer prompt starts with the shorter one."""
    rng = random.Random(tag)
    return tag + "".join(f" {rng.choice(_WORDS.split())}" for _ in range(num_words))


def token_prompt(tag: str, num_tokens: int) -> list[int]:
    """Return random token ids seeded by `tag`, none special; a longer prompt starts with the shorter one."""
    rng = random.Random(tag)
    return [rng.randrange(300, 3900) for _ in range(num_tokens)]


def expected_text(prompt: list[int], num_tokens: int) -> str:
    """Return the text that the fake executor generates after `prompt`."""
    return text_of(continuation(prompt, num_tokens))


def count(text: str) -> int:
    return len(vocabulary.encode(text))


def piece_of(token_id: int) -> str:
    """Return a token's text; empty for an incomplete character."""
    decoder = vocabulary.decoder.make_decoder(skip_special_tokens=True, prompt_tail=())
    return decoder.push(token_id)


def plain_tokens() -> dict[str, int]:
    """Return the ids of tokens of two or more letters by text, if no other token has the same text."""
    texts = [vocabulary.decoder.token_text(token_id).text for token_id in range(vocabulary.tokenizer.get_vocab_size())]
    plain = [text.strip().isalpha() and text.isascii() and len(text) > 1 for text in texts]
    number = Counter(texts)
    return {text: token_id for token_id, text in enumerate(texts) if plain[token_id] and number[text] == 1}


PLAIN_TOKENS = plain_tokens()
VARIED: dict[str, Any] = {"allowed_token_ids": list(PLAIN_TOKENS.values()), "frequency_penalty": 2.0}
"""Fields that make an output varied text that can be cut anywhere; without them the output of random weights depends
on the instruction set."""
