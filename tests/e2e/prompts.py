"""Prompts for shared servers: each tag has words of its own, so only its own test has warmed the cache for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from quipu.actors.shared.checkpoint import DEMO
from tests.vocabularies import Vocabulary

_WORDS = "the list method returns a new object that sorts every item in place when its key is given as second argument"

vocabulary = Vocabulary(Path(DEMO))
"""The demo model's, which the fake executor serves, too."""


def text_prompt(tag: str, num_words: int) -> str:
    """Words drawn for `tag`; with more words the same ones come first."""
    chooser = random.Random(tag)
    return tag + "".join(f" {chooser.choice(_WORDS.split())}" for _ in range(num_words))


def token_prompt(tag: str, num_tokens: int) -> list[int]:
    """Token ids drawn for `tag`, none of them special; with more tokens the same ones come first."""
    chooser = random.Random(tag)
    return [chooser.randrange(300, 3900) for _ in range(num_tokens)]


def count(text: str) -> int:
    return len(vocabulary.encode(text))


def piece_of(token_id: int) -> str:
    """One token's text; empty for a part of a character."""
    decoder = vocabulary.decoder.make_decoder(skip_special_tokens=True, prompt_tail=())
    return decoder.push(token_id)


def plain_tokens() -> dict[str, int]:
    """Ids of tokens that are two letters or more, by their texts, each of which only one token has."""
    texts = [vocabulary.decoder.token_text(token_id).text for token_id in range(vocabulary.tokenizer.get_vocab_size())]
    plain = [text.strip().isalpha() and text.isascii() and len(text) > 1 for text in texts]
    return {text: token_id for token_id, text in enumerate(texts) if plain[token_id] and texts.count(text) == 1}


PLAIN_TOKENS = plain_tokens()
VARIED: dict[str, Any] = {"allowed_token_ids": list(PLAIN_TOKENS.values()), "frequency_penalty": 2.0}
"""Fields with which an answer is text that can be cut anywhere, and does not go round in circles: what a model with
random weights likes to say differs among instruction sets."""
