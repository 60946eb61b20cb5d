"""Who waits for a prefix that somebody else is computing, and who computes it as well.

Used by the KV-block manager's walk, while it looks at candidates. A candidate whose next block a row of this very step
writes can be passed over: a later step finds that block. What that costs is a *delay*, in steps:

    delay = steps until the shared blocks are written + steps for the rest - steps it would need from now on by itself

and what it saves is the computation of those blocks, for itself and for everybody who begins alike. A step has a price
of its own, whatever is in it: about that of `step_overhead_tokens` positions. So:

    delay > 2                                  compute
    delay <= 0                                 wait: it is served no later, and the others sooner
    saved >= delay * step_overhead_tokens      wait
    otherwise                                  compute

What must always hold: nobody waits for blocks that no row of this step writes; nobody waits longer than it was told
when it began to, and two steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..messages.block_manager import Reserve

MAX_DELAY_STEPS = 2
STEP_OVERHEAD_TOKENS = 512
"""On GPUs, where up to some hundred positions cost a pass about as much as one: weights have to be read anyway."""


@attrs.define
class PendingPrefix:
    """A row of this step, and the chain of blocks that it writes."""

    keys: list[bytes]
    num_known: int
    """Blocks of the chain that can be found already; the next one is written in this step."""
    start: int
    count: int
    """It computes the positions from `start` on, so many."""
    pace: int
    """Positions that it computes in each further step, as far as anybody can tell."""
    num_saved: int | None = None
    """Positions that need not be computed if everybody waits who can; not known before somebody asks."""


class PendingPrefixes:
    """The prefixes that one walk's rows write, and the patience of those who wait for one."""

    def __init__(self, block_size: int, step_overhead_tokens: int) -> None:
        self._block_size = block_size
        self._step_overhead_tokens = step_overhead_tokens
        self._patience: dict[int, int] = {}
        self._by_next_key: dict[bytes, PendingPrefix] = {}

    def begin(self, candidate_ids: Iterable[int]) -> None:
        """A new walk: nothing is written yet; those who are gone are forgotten."""
        self._by_next_key.clear()
        if self._patience:
            self._patience = {i: self._patience[i] for i in candidate_ids if i in self._patience}

    def announce(self, keys: list[bytes], num_known: int, start: int, count: int, pace: int) -> None:
        """A row of this step computes `count` positions from `start` on, then `pace` a step.

        The first `num_known` of its blocks can be found already.
        """
        if num_known < len(keys) and (num_known + 1) * self._block_size <= start + count:
            self._by_next_key.setdefault(keys[num_known], PendingPrefix(keys, num_known, start, count, pace))

    def is_awaited(self, proposal: Reserve, index: int, num_found: int, limit: int, budget: int) -> bool:
        """Whether candidate `index` is better served by a later step.

        `num_found` of its blocks are there, `limit` of them at most may be reused; `budget` positions are left.
        """
        keys, sequence_id = proposal.candidate_keys[index], proposal.candidate_ids[index]
        pending = self._by_next_key.get(keys[num_found]) if num_found < limit else None
        if pending is None:
            return False
        size, chunk = self._block_size, proposal.candidate_chunk_limit
        shared_end = _num_shared(keys, pending.keys, num_found, limit) * size
        num_tokens = proposal.candidate_num_tokens[index]
        wait = _num_steps(shared_end - pending.start, pending.count, pending.pace)
        delay = wait + _num_steps(num_tokens - shared_end, chunk, chunk)
        delay -= _num_steps(num_tokens - num_found * size, min(budget, chunk), chunk)
        patience = self._patience.get(sequence_id, wait + MAX_DELAY_STEPS)
        if patience <= 0 or delay > MAX_DELAY_STEPS:
            return False
        if delay > 0 and self._saved(pending, proposal, index, wait * budget) < delay * self._step_overhead_tokens:
            return False
        self._patience[sequence_id] = patience - 1
        return True

    def _saved(self, pending: PendingPrefix, proposal: Reserve, index: int, at_most: int) -> int:
        """Positions of the prefix that all candidates from `index` on would compute: no more than there is budget."""
        if pending.num_saved is None:
            first = pending.num_known
            pending.num_saved = 0
            for keys, num_tokens in zip(
                proposal.candidate_keys[index:], proposal.candidate_num_tokens[index:], strict=True
            ):
                limit = min((num_tokens - 1) // self._block_size, len(keys))
                if first < limit and keys[first] == pending.keys[first]:
                    num_shared = _num_shared(keys, pending.keys, first, limit)
                    pending.num_saved += (num_shared - first) * self._block_size
        return min(pending.num_saved, at_most)


def _num_shared(keys: list[bytes], others: list[bytes], low: int, limit: int) -> int:
    """How many of the first `limit` keys two chains share that share the one at `low`.

    A key names all that comes before its block, so the last one in common can be searched for by halves.
    """
    low, high = low + 1, min(limit, len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _num_steps(num_tokens: int, now: int, then: int) -> int:
    """Steps that compute `num_tokens`: `now` of them in the first, `then` in each further one."""
    return 1 + max(0, -(-(num_tokens - now) // then))
