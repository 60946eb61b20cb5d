"""Prompts generated from a seed, as token ids or as words.

Datasets generate lists of token ids, each from a key of its own, so equal keys give equal tokens and the order of
generation does not matter. A `Wording` then formats them: as ids (the server gets exactly that many tokens), or as text
with one common word per id (about one token each in most vocabularies, but only the server knows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

_COMMON = """
about above across after again against air all almost along also always among animal answer any apple area arm
around ask away baby back ball bank base bear because bed before begin behind best better between big bird black
blue boat body book born both bottom box boy bread bring brother brown build burn busy call camp car care carry cat
catch cause center chance change check child city class clean clear close cloud coat cold color come common cook
cool corn corner cost country course cover cross cry cut dance dark day deep dog door down draw dream dress drink
drive drop dry early earth east easy edge egg end enough even ever every eye face fact fall family far farm fast
father feel feet few field fight fill find fine finger fire first fish five floor flow flower fly follow food foot
forest form four free fresh friend front fruit full game garden gate gave get girl give glass gold good grass great
green ground group grow half hand happy hard hat have head hear heart heat heavy help here high hill hold hole home
hope horse hot hour runtime hundred ice idea inch iron island job join jump just keep key kind king know lady lake
land large last late laugh lead leaf learn leave left leg letter level lie life lift light like line list listen
little live long look lost love low machine main make man many map mark market matter mean measure meet milk mind
minute moon more morning mother mountain mouth move music name near neck need never new night north nose note
nothing number ocean off often oil old once one only open order other over page paint paper part
"""
WORDS = tuple(_COMMON.split())


@attrs.frozen
class TokenRange:
    """The ids to choose from: `low` up to, but not including, `high`."""

    low: int
    high: int

    @classmethod
    def of_vocabulary(cls, vocab_size: int) -> TokenRange:
        """Return the middle of a vocabulary, without the special tokens and single bytes at its ends."""
        return cls(min(1000, vocab_size // 4), max(vocab_size - vocab_size // 10, 1))


@attrs.frozen
class Wording:
    """How generated ids become a request's body."""

    tokens: TokenRange
    as_ids: bool
    is_chat: bool

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[id_ % len(WORDS)] for id_ in ids)

    def fields(self, ids: list[int]) -> dict[str, Any]:
        """Return the `prompt` or `messages` of a request with these ids."""
        if self.is_chat:
            return {"messages": [{"role": "user", "content": self.text(ids)}]}
        return {"prompt": ids if self.as_ids else self.text(ids)}


@attrs.frozen
class Lengths:
    """Return an integer, uniform from `mean * (1 - ratio)` to `mean * (1 + ratio)` inclusive, and at least 1."""

    mean: int
    ratio: float

    def draw(self, *key: int) -> int:
        low = max(1, int(self.mean * (1 - self.ratio)))
        high = max(low, int(np.ceil(self.mean * (1 + self.ratio))))
        return int(generator(*key).integers(low, high + 1))


def generator(*key: int) -> np.random.Generator:
    """Return the random generator of a key of non-negative numbers."""
    return np.random.default_rng(key)


def draw_ids(tokens: TokenRange, num_tokens: int, *key: int) -> list[int]:
    ids: list[int] = generator(*key).integers(tokens.low, tokens.high, num_tokens).tolist()
    return ids
