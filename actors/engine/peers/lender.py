"""Asks the KV-block manager for blocks that peers want, and tells it when they are copied (`Lend`, `Lent`, `EndLend`).

Used by `peer_server.py` and what sends blocks for it.

What must always hold: whatever was lent is ended once, also if nobody waits for the answer any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from ...channel import Poster
from ...messages.mover import EndLend, Lend, Lending, Lent

LONGEST_WAIT_S: Final = 3600.0
"""How long a peer may wait for one block to be computed."""

Call = Callable[..., Awaitable[Any]]
"""Calls what copies, with its arguments: in a thread, or in the loop."""


class Lender:
    """Asks the KV-block manager for blocks."""

    def __init__(self, block_manager: Poster[Lending]) -> None:
        self._block_manager = block_manager
        self._num_lends = 0
        self._answers: dict[int, trio.MemorySendChannel[list[int]]] = {}

    async def lend(self, keys: list[bytes], *, waits: bool) -> tuple[int, list[int]]:
        """Return the number under which blocks are held, and the blocks. `end` must follow."""
        self._num_lends += 1
        number = self._num_lends
        send, receive = trio.open_memory_channel[list[int]](1)
        self._answers[number] = send
        blocks: list[int] = []
        try:
            self._block_manager.post(Lend(number, keys, waits))
            with trio.move_on_after(LONGEST_WAIT_S):
                blocks = await receive.receive()
        except BaseException:
            self.end(number)
            raise
        finally:
            del self._answers[number]
        return number, blocks

    def on_lent(self, lent: Lent) -> None:
        """Pass on an answer. Nobody waits for one whose request was cancelled; its end is on its way."""
        if (answer := self._answers.get(lent.number)) is not None:
            answer.send_nowait(lent.blocks)

    def end(self, number: int) -> None:
        self._block_manager.post(EndLend(number))
