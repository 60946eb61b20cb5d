"""The account of a request with many prompts, made of accounts of some of its prompts each. Pure.

Every report about a request has its account made anew. With thousands of prompts that takes tens of milliseconds, and
few of them have changed since the last report: most have ended, or were not submitted yet. So only those parts are made
anew of which entries were added, and the sums of the others are kept with them.

What must always hold: every number is that of the same account in one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain

import attrs
import msgspec

from ..messages.accountant import OpenAccount
from ..messages.block_manager import CacheMiss
from ..messages.counts import Count, total
from ..messages.handler import PromptNumbers
from ..messages.prompts import Breakpoint, CacheTtl
from .account import Account
from .account_entries import Admission
from .prompt_account import PromptAccount, told_by_prompt

PART_SEQUENCES = 64
"""Sequences of a part, and a few more: choices of one prompt are in one part."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Whose sequence of a request it is."""

    sequence_id: int
    prompt_index: int
    choice_index: int
    num_prompt_tokens: int
    breakpoints: tuple[Breakpoint, ...]


@attrs.frozen
class PartSums:
    """The sums of a part, by the names of `AccountSums`."""

    admitted_prompts: list[PromptAccount]
    num_frozen_prompts: int
    prompt_tokens: Count
    cached: Count
    router_estimate: int | None
    cache_write: Count
    cache_misses: tuple[CacheMiss, ...]
    created: dict[CacheTtl, int]
    cached_by_tier: dict[str, int] | None
    told: dict[int, PromptNumbers]
    is_finished: bool
    moved: Counter[int | None]
    deaths: set[int]
    continued_by: Admission | None
    counts: dict[str, int]
    problems: list[str]


class AccountPart(Account):
    """The account of some prompts of a request. Once it was made, only `withdraw` changes it."""

    @cached_property
    def sums(self) -> PartSums:
        return PartSums(
            self.admitted_prompts,
            self.num_frozen_prompts,
            self.prompt_tokens,
            self.cached,
            self.router_estimate,
            self.cache_write,
            self.cache_misses,
            {ttl: self.created(ttl) for ttl in CacheTtl},
            self.cached_by_tier,
            told_by_prompt(self.prompts),
            self.is_finished,
            self.moved,
            self.deaths,
            self.continued_by,
            self.counts(),
            self.problems(),
        )

    def withdraw(self) -> None:
        super().withdraw()
        self.__dict__.pop("sums", None)


class DividedAccount(Account):
    """The account of all prompts of a request, whose sums are those of its parts."""

    def __init__(self, opened: OpenAccount, received_unix_s: float, parts: Sequence[AccountPart]) -> None:
        super().__init__(opened, received_unix_s)
        self._parts = parts
        for part in parts:
            self.sequences.update(part.sequences)
            self.prompts.update(part.prompts)
        first = next((part for part in parts if part.admitted_at is not None), None)
        if first is not None:
            self.admitted_at, self.engine_id, self.incarnation = first.admitted_at, first.engine_id, first.incarnation
        begun = [part.first_token_at for part in parts if part.first_token_at is not None]
        if begun:
            self.first_token_at = max(min(begun), self.admitted_at or min(begun))

    def withdraw(self) -> None:
        super().withdraw()
        for part in self._parts:
            part.withdraw()

    @property
    def _sums(self) -> list[PartSums]:
        return [part.sums for part in self._parts]

    @property
    def _known_sums(self) -> list[PartSums]:
        """Those of the parts that have admitted prompts."""
        return [sums for sums in self._sums if sums.admitted_prompts]

    @property
    def admitted_prompts(self) -> list[PromptAccount]:
        return [*chain.from_iterable(sums.admitted_prompts for sums in self._sums)]

    @property
    def num_frozen_prompts(self) -> int:
        return sum(sums.num_frozen_prompts for sums in self._sums)

    @property
    def prompt_tokens(self) -> Count:
        return total(sums.prompt_tokens for sums in self._known_sums)

    @property
    def cached(self) -> Count:
        return total(sums.cached for sums in self._known_sums)

    @property
    def router_estimate(self) -> int | None:
        estimates = [sums.router_estimate for sums in self._known_sums]
        known = [estimate for estimate in estimates if estimate is not None]
        return sum(known) if known and len(known) == len(estimates) else None

    @property
    def cache_write(self) -> Count:
        return total(sums.cache_write for sums in self._known_sums)

    @property
    def cache_misses(self) -> tuple[CacheMiss, ...]:
        return tuple(chain.from_iterable(sums.cache_misses for sums in self._sums))

    def created(self, ttl: CacheTtl) -> int:
        return sum(sums.created[ttl] for sums in self._sums)

    @property
    def cached_by_tier(self) -> dict[str, int] | None:
        return _added(sums.cached_by_tier for sums in self._known_sums)

    def told_by_prompt(self) -> dict[int, PromptNumbers]:
        told: dict[int, PromptNumbers] = {}
        for sums in self._sums:
            told.update(sums.told)
        return told if len(self.prompts) > 1 else {}

    @property
    def is_finished(self) -> bool:
        return all(sums.is_finished for sums in self._sums)

    @property
    def moved(self) -> Counter[int | None]:
        return sum((sums.moved for sums in self._sums if sums.moved), Counter())

    @property
    def deaths(self) -> set[int]:
        return set().union(*(sums.deaths for sums in self._sums))

    @property
    def continued_by(self) -> Admission | None:
        return next(filter(None, (sums.continued_by for sums in self._sums)), None)

    def counts(self) -> dict[str, int]:
        return _added(sums.counts for sums in self._sums) or {}

    def problems(self) -> list[str]:
        return [*chain.from_iterable(sums.problems for sums in self._sums)]


class AccountParts:
    """The parts of an account, each of which is kept until its sequences get another entry."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places: list[list[Place]] = []
        self._part_of: dict[int, int] = {}
        for place in places:
            last = self._places[-1] if self._places else []
            if not last or (len(last) >= PART_SEQUENCES and last[-1].prompt_index != place.prompt_index):
                self._places.append([])
            self._places[-1].append(place)
            self._part_of[place.sequence_id] = len(self._places) - 1
        self._made: list[AccountPart | None] = [None] * len(self._places)

    def note(self, sequence_id: int) -> None:
        """Note that a sequence has another entry."""
        self._made[self._part_of[sequence_id]] = None

    def forget(self) -> None:
        """Have every part made anew."""
        self._made = [None] * len(self._places)

    def made(self, make: Callable[[Sequence[Place]], AccountPart]) -> list[AccountPart]:
        """Return all parts, and make those that have changed."""
        parts = [make(its) if part is None else part for its, part in zip(self._places, self._made, strict=True)]
        self._made = [*parts]
        return parts


def _added(parts: Iterable[dict[str, int] | None]) -> dict[str, int] | None:
    """Return the sums of numbers by name; None if they are not known of a part, or there is none."""
    added: dict[str, int] = {}
    for part in parts:
        if part is None:
            return None
        for name, number in part.items():
            added[name] = added.get(name, 0) + number
    return added or None
