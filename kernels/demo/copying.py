"""Rows of random tokens that can only be predicted by looking back: what a model learns before any text.

Reading a document needs two skills that take millions of tokens to appear in text alone: to look up what came after an
earlier occurrence, and to look up by two words at once (a person and a property).
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Row = tuple[NDArray[np.int64], NDArray[np.float32]]

LONGEST_PROPERTY = 3
"""Most tokens of a property."""


def repeated_tokens(generator: Generator, length: int, vocab_size: int) -> Row:
    """Make a row of a few random tokens again and again."""
    period = generator.integers(4, length // 3 + 1)
    token_ids = np.resize(generator.integers(vocab_size, size=period), length)
    return token_ids, (np.arange(length) >= period).astype(np.float32)


def repeated_facts(generator: Generator, length: int, vocab_size: int) -> Row:
    """Make a row of random facts, and the same facts in another order, whose values are to be predicted.

    A fact is a person, a property's own tokens, and a value. Persons have several properties, and properties several
    persons, so that neither alone is enough to know a value.
    """
    num_properties = int(generator.integers(2, 6))
    properties = [
        generator.integers(vocab_size, size=generator.integers(1, LONGEST_PROPERTY + 1)) for _ in range(num_properties)
    ]
    facts: list[NDArray[np.int64]] = []
    room = length // 2
    persons = generator.integers(vocab_size, size=length)
    pairs = [(person, place) for person in persons[: 2 + length // 24] for place in range(num_properties)]
    for index in generator.permutation(len(pairs)):
        person, place = pairs[index]
        fact = np.concatenate(([person], properties[place], generator.integers(vocab_size, size=1)))
        if (room := room - len(fact)) < 0:
            break
        facts.append(fact)
    again = [facts[index] for index in generator.permutation(len(facts))]
    rest = generator.integers(vocab_size, size=length - 2 * sum(map(len, facts)))
    token_ids = np.concatenate((rest, *facts, *again))
    weights = np.zeros(length, np.float32)
    position = length - sum(map(len, facts)) - 1
    for fact in again:
        position += len(fact)
        weights[position] = 1.0
    return token_ids, weights
