"""Prompts that nobody has sent before, whose common prefixes are known, and which a shell can write in one line.

A prompt begins with random letters, its salt, so that it shares nothing with any other. Then come numbers with a long
word between them, and sometimes a tail of numbers alone. Words have many characters a token and numbers few, so that a
count guessed from characters differs from one of tokens. `$(seq -s ' word ' 10000 10200)` writes the same in a shell.

As token ids (for `/v1/completions`), a salt is eight random ids and each number is one id.
"""

from __future__ import annotations

import hashlib
import random
import string

import attrs

WORD = " responsibility "
_SALT_LETTERS = 16
_FIRST, _LAST = 10_000, 99_999
_BODY_IDS, _TAIL_IDS = range(300, 1300), range(1300, 1900)
"""Ids that every vocabulary in use has, and that are no special tokens."""


@attrs.frozen
class Numbers:
    """Consecutive numbers, with something between them."""

    first: int
    num: int
    between: str

    def text(self) -> str:
        return self.between.join(map(str, range(self.first, self.first + self.num)))

    def shell(self) -> str:
        return f"$(seq -s '{self.between}' {self.first} {self.first + self.num - 1})"

    def ids(self) -> list[int]:
        ids = _BODY_IDS if self.between == WORD else _TAIL_IDS
        return [ids[(self.first + place) % len(ids)] for place in range(self.num)]


@attrs.frozen
class Prompt:
    salt: str
    body: Numbers
    tail: Numbers | None = None

    def grown(self, num: int) -> Prompt:
        """Return the prompt with so many more numbers at its end."""
        return attrs.evolve(self, body=attrs.evolve(self.body, num=self.body.num + num))

    def with_tail(self, num: int, draw: random.Random) -> Prompt:
        """Return the prompt with a new tail of so many numbers, none of which goes on where the body ends."""
        return attrs.evolve(self, tail=Numbers(draw.randrange(_FIRST, _LAST - num), num, " "))

    def text(self) -> str:
        return " ".join([self.salt, *(part.text() for part in self._parts())])

    def shell(self) -> str:
        """Return the text as it stands in a shell's here-document."""
        return " ".join([self.salt, *(part.shell() for part in self._parts())])

    def ids(self) -> list[int]:
        digest = hashlib.sha256(self.salt.encode()).digest()
        salt = [300 + int.from_bytes(digest[i : i + 4]) % 1600 for i in range(0, 32, 4)]
        return salt + [token_id for part in self._parts() for token_id in part.ids()]

    def _parts(self) -> list[Numbers]:
        return [self.body] if self.tail is None else [self.body, self.tail]


def draw_prompt(num: int, draw: random.Random) -> Prompt:
    """Return a new prompt with so many numbers in its body."""
    salt = "".join(draw.choices(string.ascii_lowercase, k=_SALT_LETTERS))
    return Prompt(salt, Numbers(draw.randrange(_FIRST, _LAST - 4 * num), num, WORD))


def shell_ids(ids: list[int]) -> str:
    """Return token ids as they stand in a here-document: runs of consecutive ones as `$(seq …)`."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(ids) + 1):
        if place < len(ids) and ids[place] == ids[place - 1] + 1:
            continue
        run = ids[start:place]
        parts.append(f"$(seq -s, {run[0]} {run[-1]})" if len(run) > 8 else ",".join(map(str, run)))
        start = place
    return "[" + ",".join(parts) + "]"
