"""Who is admitted next: the waiting sequences, in the order of a policy.

    fcfs      in order of arrival
    priority  lowest number first, then in order of arrival
    fair      by tenant, least charged first; a tenant is charged for *uncached* prompt tokens when they are computed,
              so cached prompts are free and a cold prompt delays only its own tenant

Under each policy, lines of batches come after everything that somebody waits for.

What must always hold: a preempted sequence comes before those of its tenant (or priority) that have not been served
yet; an idle tenant accumulates no credit; who waits for a load delays nobody but later choices of its own prompt.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import chain, islice

from .sequence import Sequence


class Policy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


Rank = tuple[int, int]


_BELOW_ALL = 1 << 64
"""More than any priority."""


def rank_by_arrival(sequence: Sequence) -> Rank:
    return (_BELOW_ALL if sequence.is_batch else 0, sequence.arrival)


def rank_by_priority(sequence: Sequence) -> Rank:
    return (sequence.priority + _BELOW_ALL if sequence.is_batch else sequence.priority, sequence.arrival)


class WaitingQueue:
    """Waiting sequences under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rank = rank_by_priority if policy is Policy.PRIORITY else rank_by_arrival
        """Order within one queue; its reverse is the order of preemption."""
        self._queues: dict[str, list[Sequence]] = {}
        self._charged: dict[str, int] = {}
        self._virtual_charge = 0
        """What the tenant served last had been charged before: the starting charge of a tenant that returns."""
        self._length = self._num_batch = 0
        self.num_tokens = 0
        """Tokens that all of them have to compute."""
        self._loading: dict[int, Sequence] = {}
        """Sequences that wait for blocks to be loaded, by id: they keep their places, and others overtake them, except
        for later choices of the same prompt. Those would compute what the first is then said to have found cached."""
        self._num_by_tenant: dict[str, tuple[int, int]] = {}
        """Sequences and tokens, by tenant that has any."""

    def __len__(self) -> int:
        return self._length

    def awaited(self, count: int) -> list[Sequence]:
        """Return those of the next `count` sequences that are not of batches."""
        if self._length == self._num_batch:
            return []
        return [sequence for sequence in self.first(count) if not sequence.is_batch]

    def num_of(self, tenant: str) -> int:
        """Return how many sequences of one tenant are waiting."""
        return self._num_by_tenant.get(tenant, (0, 0))[0]

    def num_tokens_of(self, tenant: str) -> int:
        """Return how many tokens the sequences of one tenant have to compute."""
        return self._num_by_tenant.get(tenant, (0, 0))[1]

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_sequences, num_tokens = self._num_by_tenant.get(sequence.tenant, (0, 0))
        if num_sequences + sign:
            counted = (num_sequences + sign, num_tokens + sign * len(sequence.tokens))
            self._num_by_tenant[sequence.tenant] = counted
        else:
            del self._num_by_tenant[sequence.tenant]
        self._length += sign
        self._num_batch += sign * sequence.is_batch
        self.num_tokens += sign * len(sequence.tokens)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that has arrived or returns, at the position of its rank."""
        name = self._queue_name(sequence)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = []
            self._charged[name] = max(self._charged.get(name, 0), self._virtual_charge)
        if queue and self.rank(queue[-1]) > self.rank(sequence):
            bisect.insort(queue, sequence, key=self.rank)
        else:
            queue.append(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is admitted or ended. Raises ValueError if it is not waiting."""
        name = self._queue_name(sequence)
        queue = self._queues.get(name, [])
        queue.remove(sequence)
        if not queue:
            del self._queues[name]
        self._loading.pop(sequence.id, None)
        self._count(sequence, -1)

    def set_loading(self, sequence: Sequence) -> None:
        """Pass over a waiting sequence until `end_loading`."""
        self._loading[sequence.id] = sequence

    def end_loading(self, sequence_ids: Iterable[int]) -> None:
        """Note that these sequences need not wait for blocks any longer, whether or not they are waiting."""
        for sequence_id in sequence_ids:
            self._loading.pop(sequence_id, None)

    def first(self, count: int) -> list[Sequence]:
        """Return the next `count` sequences, which stay in the queue."""
        if count <= 0:
            return []
        order = self._in_order()
        return list(islice(self._ready(order) if self._loading else order, count))

    def _ready(self, order: Iterator[Sequence]) -> Iterator[Sequence]:
        """Yield those that do not wait for blocks to be loaded, nor does an earlier choice of the same prompt."""
        earliest: dict[int, int] = {}  # arrival, by prompt: choices that have not begun share one list
        for s in self._loading.values():
            prompt = id(s.known_tokens)
            earliest[prompt] = min(s.arrival, earliest.get(prompt, s.arrival))
        for s in order:
            if s.id not in self._loading and s.arrival <= earliest.get(id(s.known_tokens), s.arrival):
                yield s

    def _in_order(self) -> Iterator[Sequence]:
        if len(self._queues) <= 1:
            return chain(*self._queues.values())
        order = self._round_robin()
        if 0 < self._num_batch < self._length:
            awaited = (sequence for sequence in order if not sequence.is_batch)
            order = chain(awaited, (sequence for sequence in self._round_robin() if sequence.is_batch))
        return order

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the sequence's tenant for computed prompt tokens."""
        if self.policy is Policy.FAIR:
            before = self._charged.get(sequence.tenant, 0)
            self._virtual_charge = max(self._virtual_charge, before)
            self._charged[sequence.tenant] = before + num_tokens

    def tenants(self) -> list[str]:
        """Return the waiting tenants, least charged first; under other policies, one queue for all."""
        return sorted(self._queues, key=lambda name: (self._charged[name], name))

    def _round_robin(self) -> Iterator[Sequence]:
        """Yield one sequence of each tenant, least charged first, then the next of each."""
        queues = [iter(self._queues[name]) for name in self.tenants()]
        while queues:
            for queue in list(queues):
                sequence = next(queue, None)
                if sequence is None:
                    queues.remove(queue)
                else:
                    yield sequence

    def _queue_name(self, sequence: Sequence) -> str:
        return sequence.tenant if self.policy is Policy.FAIR else ""
