"""Which candidates wait for a prefix that another sequence is computing, and which compute it themselves.

Used by `reservation.py` while it looks at candidates. A candidate whose next block is being written by a row of this
very step can be skipped, since a later step will find that block. This costs a *delay*, in steps:

    delay = steps until the shared blocks are written + steps for the rest - steps it would need on its own from now on

and saves the computation of those blocks, for this candidate and for all others with the same prefix. A step has a
fixed cost whatever it computes, about that of `step_overhead_tokens` positions. So:

    delay > 2                                  compute
    delay <= 0                                 wait: it is served no later, and others sooner
    saved >= delay * step_overhead_tokens      wait
    otherwise                                  compute

What must always hold: no candidate waits for blocks that no row of this step writes; none waits longer than the wait
computed when it began, plus two steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ...messages.block_manager import Reserve

MAX_DELAY_STEPS = 2
STEP_OVERHEAD_TOKENS = 512
"""For GPUs, where a pass over a few hundred positions takes about as long as one over a single position, because the
weights have to be read either way."""


@attrs.define
class PendingPrefix:
    """A row of this step, and the chain of blocks that it writes."""

    keys: list[bytes]
    num_known: int
    """Blocks of the chain that can be found already; the next one is written in this step."""
    start: int
    count: int
    """How many positions it computes, from `start` on."""
    pace: int
    """Expected number of positions that it computes in each further step."""
    num_saved: int | None = None
    """Positions that need not be computed if all candidates with this prefix wait; computed on demand."""


class PendingPrefixes:
    """The prefixes that one step's rows write, and how much longer each candidate may wait."""

    def __init__(self, block_size: int, step_overhead_tokens: int) -> None:
        self._block_size = block_size
        self._step_overhead_tokens = step_overhead_tokens
        self._patience: dict[int, int] = {}
        self._by_next_key: dict[bytes, PendingPrefix] = {}

    def begin(self, candidate_ids: Iterable[int]) -> None:
        """Begin a new step with these candidates, forgetting others."""
        self._by_next_key.clear()
        if self._patience:
            self._patience = {i: self._patience[i] for i in candidate_ids if i in self._patience}

    def announce(self, keys: list[bytes], num_known: int, start: int, count: int, pace: int) -> None:
        """Announce a row that computes `count` positions from `start` on in this step, then `pace` per step.

        The first `num_known` of its blocks can be found already.
        """
        if num_known < len(keys) and (num_known + 1) * self._block_size <= start + count:
            self._by_next_key.setdefault(keys[num_known], PendingPrefix(keys, num_known, start, count, pace))

    def is_awaited(self, reserve: Reserve, index: int, num_found: int, limit: int, budget: int) -> bool:
        """Return whether candidate `index` is better served by a later step.

        `num_found` of its blocks are cached, and at most `limit` may be reused; `budget` positions are left.
        """
        keys, sequence_id = reserve.candidate_keys[index], reserve.candidate_ids[index]
        pending = self._by_next_key.get(keys[num_found]) if num_found < limit else None
        if pending is None:
            return False
        size, chunk = self._block_size, reserve.candidate_chunk_limit
        shared_end = _num_shared(keys, pending.keys, num_found, limit) * size
        num_tokens = reserve.candidate_num_tokens[index]
        wait = _num_steps(shared_end - pending.start, pending.count, pending.pace)
        delay = wait + _num_steps(num_tokens - shared_end, chunk, chunk)
        delay -= _num_steps(num_tokens - num_found * size, min(budget, chunk), chunk)
        patience = self._patience.get(sequence_id, wait + MAX_DELAY_STEPS)
        if patience <= 0 or delay > MAX_DELAY_STEPS:
            return False
        if delay > 0 and self._saved(pending, reserve, index, wait * budget) < delay * self._step_overhead_tokens:
            return False
        self._patience[sequence_id] = patience - 1
        return True

    def _saved(self, pending: PendingPrefix, reserve: Reserve, index: int, at_most: int) -> int:
        """Return how many positions of the prefix candidates from `index` on would compute, limited by `at_most`."""
        if pending.num_saved is None:
            first = pending.num_known
            pending.num_saved = 0
            for keys, num_tokens in zip(
                reserve.candidate_keys[index:], reserve.candidate_num_tokens[index:], strict=True
            ):
                limit = min((num_tokens - 1) // self._block_size, len(keys))
                if first < limit and keys[first] == pending.keys[first]:
                    num_shared = _num_shared(keys, pending.keys, first, limit)
                    pending.num_saved += (num_shared - first) * self._block_size
        return min(pending.num_saved, at_most)


def _num_shared(keys: list[bytes], others: list[bytes], low: int, limit: int) -> int:
    """Return how many of the first `limit` keys two chains share, given that they share the one at `low`.

    A key depends on everything before its block, so the last common key can be found by bisection.
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
    """Return the steps needed for `num_tokens`: `now` of them in the first step, `then` in each further one."""
    return 1 + max(0, -(-(num_tokens - now) // then))
