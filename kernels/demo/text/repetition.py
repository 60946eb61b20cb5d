"""Chats in which words are repeated, which teach a model to copy from its context before it can look anything up."""

from __future__ import annotations

import json
from random import Random

from . import words
from .chats import Chat, assistant, user

_LISTS = (
    words.NAMES, words.COLOURS, words.TOWNS, words.TRADES, words.ANIMALS, words.FRUITS, words.INSTRUMENTS, words.TREES,
    words.DISHES, words.DRINKS, words.THINGS, words.PLACES, words.HIDING_PLACES, words.SUBJECTS, words.DAYS,
    words.SYLLABLES,
)  # fmt: skip
WORDS = tuple(dict.fromkeys(word for words_ in _LISTS for word in words_))


def repetition_chat(random: Random) -> Chat:
    """Make a chat in which some words are to be said again, written as JSON, or looked up by the word before them."""
    messages = []
    for _ in range(random.randint(1, 3)):
        said = random.sample(WORDS, random.randint(2, 16))
        kind = random.random()
        if kind < 0.4:
            request = random.choice(("Repeat these words: {}", "Say this again: {}", "Repeat after me: {}", "Echo: {}"))
            messages += [user(request.format(" ".join(said))), assistant(" ".join(said))]
        elif kind < 0.7:
            request = random.choice(("Write this list as JSON: {}", "JSON list, please: {}", "As a JSON array: {}"))
            messages += [user(request.format(", ".join(said))), assistant(json.dumps(said))]
        else:
            place = random.randrange(len(said) - 1)
            request = random.choice(("Which word comes after {word} here: {}", "{} - what follows {word}?"))
            text = request.format(" ".join(said), word=said[place])
            messages += [user(text), assistant(f"After {said[place]} comes {said[place + 1]}.")]
    return Chat("repetition", messages)
