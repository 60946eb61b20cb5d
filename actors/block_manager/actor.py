"""The KV-block manager: says what each step may use of the KV cache, and what a prompt finds there.

Talks to the scheduler only: one `Reserve` in, one `Granted` out, a step. Every decision is in `reservation.py`.
Its grant of a cached prefix is the *reused* entry of the books. An exception here is the engine's death: block tables
that cannot be trusted must not serve anybody. Where KV events are published, one batch a walk tells what it changed.
The clock of pins is this loop's.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from ..channel import Receiver, Sender
from ..messages.block_manager import Reserve
from ..messages.scheduler import Granted
from .reservation import BlockManager

log = structlog.get_logger()


async def run_block_manager(
    core: BlockManager,
    inbox: Receiver[Reserve],
    granted: Sender[Granted],
    flush_events: Callable[[], None] | None = None,
) -> None:
    """Answer proposals until cancelled. `flush_events` is called at the start, and when a grant is on its way."""
    if flush_events is not None:
        flush_events()
    while True:
        for proposal in await inbox.receive_all():
            grant = core.grant(proposal, trio.current_time())
            await granted.send(grant)
            if grant.num_pins_yielded:
                log.info("pins.yielded", num_pins=grant.num_pins_yielded, num_pinned_blocks=grant.num_pinned_blocks)
            if flush_events is not None:
                flush_events()
