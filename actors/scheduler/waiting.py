"""Who is admitted next: the waiting sequences, in the order of a policy.

    fcfs      in order of arrival
    priority  lowest number first, then arrival
    fair      by tenant: whoever has been charged least goes first; charged are *uncached* prompt tokens, when they are
              computed, so that warm prompts cost their tenant nothing and cold ones only their own tenant's turn

Used by the batcher only. What must always hold: a sequence that has been preempted comes before those of its tenant
(or priority) that have not been served yet; a tenant that was idle has saved up nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from enum import StrEnum

from .sequence import Sequence


class Policy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


Rank = tuple[int, int]


def rank_by_arrival(sequence: Sequence) -> Rank:
    return (0, sequence.arrival)


def rank_by_priority(sequence: Sequence) -> Rank:
    return (sequence.priority, sequence.arrival)


class WaitingQueue:
    """Waiting sequences under one policy. `num_tokens` is what they all have to compute."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rank = rank_by_priority if policy is Policy.PRIORITY else rank_by_arrival
        """Order within one line; its reverse is the order of victims."""
        self._lines: dict[str, list[Sequence]] = {}
        self._charged: dict[str, int] = {}
        self._virtual_charge = 0
        """What the tenant served last had been charged until then: where one begins that comes back."""
        self._length = 0
        self.num_tokens = 0
        self._num_by_tenant: dict[str, tuple[int, int]] = {}
        """Sequences and tokens of each tenant that has any."""

    def __len__(self) -> int:
        return self._length

    def num_of(self, tenant: str) -> int:
        """Sequences of one tenant."""
        return self._num_by_tenant.get(tenant, (0, 0))[0]

    def num_tokens_of(self, tenant: str) -> int:
        """What they have to compute."""
        return self._num_by_tenant.get(tenant, (0, 0))[1]

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_sequences, num_tokens = self._num_by_tenant.get(sequence.tenant, (0, 0))
        if num_sequences + sign:
            counted = (num_sequences + sign, num_tokens + sign * len(sequence.tokens))
            self._num_by_tenant[sequence.tenant] = counted
        else:
            del self._num_by_tenant[sequence.tenant]
        self._length += sign
        self.num_tokens += sign * len(sequence.tokens)

    def push(self, sequence: Sequence) -> None:
        """Add one that has arrived, or comes back; its rank finds its place."""
        name = self._line_of(sequence)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = []
            self._charged[name] = max(self._charged.get(name, 0), self._virtual_charge)
        if line and self.rank(line[-1]) > self.rank(sequence):
            bisect.insort(line, sequence, key=self.rank)
        else:
            line.append(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take one out: admitted, or ended. Raises ValueError if it is not there."""
        name = self._line_of(sequence)
        line = self._lines.get(name, [])
        line.remove(sequence)
        if not line:
            del self._lines[name]
        self._count(sequence, -1)

    def first(self, count: int) -> list[Sequence]:
        """The next `count` in line, still in it."""
        if count <= 0:
            return []
        if len(self._lines) <= 1:
            for line in self._lines.values():
                return line[:count]
            return []
        return [sequence for sequence, _ in zip(self._in_turns(), range(count), strict=False)]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Its tenant has had so many prompt tokens computed."""
        if self.policy is Policy.FAIR:
            before = self._charged.get(sequence.tenant, 0)
            self._virtual_charge = max(self._virtual_charge, before)
            self._charged[sequence.tenant] = before + num_tokens

    def tenants(self) -> list[str]:
        """Those who wait, least charged first; under other policies one line for all."""
        return sorted(self._lines, key=lambda name: (self._charged[name], name))

    def _in_turns(self) -> Iterator[Sequence]:
        """One of each tenant, least charged first, then the next of each."""
        lines = [iter(self._lines[name]) for name in self.tenants()]
        while lines:
            for line in list(lines):
                sequence = next(line, None)
                if sequence is None:
                    lines.remove(line)
                else:
                    yield sequence

    def _line_of(self, sequence: Sequence) -> str:
        return sequence.tenant if self.policy is Policy.FAIR else ""
