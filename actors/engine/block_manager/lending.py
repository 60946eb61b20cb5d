"""Blocks that other engines fetch from here: which hold the wanted keys, and for how long they are held for that.

Used by `actor.py`. The mover asks for the next few blocks of a peer (`Lend`), copies them and says when it has
(`EndLend`). Whoever wants blocks of a prompt that is being computed waits for them.

What must always hold: only blocks whose step is over are lent; what is lent is held, and neither evicted nor given to
others, until the mover has copied it; nothing else waits for a peer.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...messages.mover import Lend, Lent
from .pools import Pool


class Lending:
    """What one block manager lends."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lent: dict[int, list[int]] = {}
        self._waiting: dict[int, list[bytes]] = {}
        """Keys by the number of the `Lend`."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for peers; counted as often as they are lent."""
        return sum(map(len, self._lent.values()))

    def tables(self) -> Iterator[list[int]]:
        """Yield the blocks that are held together."""
        return iter(self._lent.values())

    def lend(self, lend: Lend) -> Lent | None:
        """Return the blocks that are there, and hold them; None if the peer waits for the first."""
        blocks = self._find(lend.keys)
        if not blocks and lend.waits:
            self._waiting[lend.number] = lend.keys
            return None
        return self._hold(lend.number, blocks)

    def end(self, number: int) -> bool:
        """Release what was lent, or wait no longer. Return whether these were the last blocks.

        Ignored if it is over.
        """
        self._waiting.pop(number, None)
        blocks = self._lent.pop(number, None)
        if blocks is None:
            return False
        self._pool.release(blocks)
        return not self._lent

    def take_ready(self) -> list[Lent]:
        """Lend what has been committed since it was asked for."""
        ready: list[Lent] = []
        for number, keys in list(self._waiting.items()) if self._waiting else ():
            if blocks := self._find(keys):
                del self._waiting[number]
                ready.append(self._hold(number, blocks))
        return ready

    def drop(self) -> None:
        """Release everything. No copy may be in progress."""
        for number in [*self._lent, *self._waiting]:
            self.end(number)

    def _find(self, keys: list[bytes]) -> list[int]:
        """Return the leading blocks that can be found and are written."""
        blocks = self._pool.match(keys, len(keys))
        return next((blocks[:at] for at, block in enumerate(blocks) if not self._pool.is_written([block])), blocks)

    def _hold(self, number: int, blocks: list[int]) -> Lent:
        self._pool.share(blocks)
        if blocks:
            self._lent[number] = blocks
        return Lent(number, blocks)
