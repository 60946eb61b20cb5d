"""The KV-block manager: decides what each step may use of the KV cache, and what of a prompt is cached.

Talks to the scheduler: one `Reserve` in and one `Granted` out per step. All decisions are in `reservation.py`. Look-ups
come from the web side and change nothing; they are answered one at a time, so that no step waits for more than one.
With tiers below the device, the moves that a grant has begun go to the mover, whose answers come back one by one; the
scheduler is told when sequences need not wait for a load any longer.
Its grant of a cached prefix is the *reused* entry of the accounts. An exception here ends the engine: block tables that
cannot be trusted must not serve any request. If KV events are published, each grant is followed by one batch of what it
changed. Pins expire by this loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from ...channel import Poster, Receiver, Sender
from ...messages.block_manager import LookUp, Reserve
from ...messages.handler import LookedUp
from ...messages.mover import (
    Lend,
    ListedPage,
    ListingFailed,
    MoveFailed,
    MoveLate,
    MoveNews,
    MoverRequest,
    TierCleared,
)
from ...messages.mover import Lending as LendingMessage
from ...messages.peers import EndFetch, Fetch
from ...messages.scheduler import AnnounceKeys, Granted, LoadsOver
from ...messages.tiers import LoadFailure
from .lower_tiers import LowerTiers
from .reservation import BlockManager

log = structlog.get_logger()


async def run_block_manager(
    block_manager: BlockManager,
    inbox: Receiver[Reserve],
    granted: Sender[Granted],
    flush_events: Callable[[], None] | None = None,
    moves: Poster[MoverRequest] | None = None,
) -> None:
    """Answer each `Reserve` until cancelled. `flush_events` is called at the start and after each grant is sent.

    `moves` is where moves go, if there are lower tiers.
    """
    if flush_events is not None:
        flush_events()
    if moves is not None and block_manager.tiers is not None:
        block_manager.tiers.begin_grant(trio.current_time())
        for move in block_manager.tiers.take_moves():
            moves.post(move)
    while True:
        for reserve in await inbox.receive_all():
            grant = block_manager.grant(reserve, trio.current_time())
            if moves is not None and block_manager.tiers is not None:
                for move in block_manager.tiers.take_moves():
                    moves.post(move)
                for lent in block_manager.lending.take_ready():
                    moves.post(lent)
            await granted.send(grant)
            if grant.num_pins_yielded:
                log.info("pins.yielded", num_pins=grant.num_pins_yielded, num_pinned_blocks=grant.num_pinned_blocks)
            if flush_events is not None:
                flush_events()


async def answer_look_ups(
    block_manager: BlockManager,
    inbox: Receiver[LookUp],
    answers: Sender[LookedUp],
    moves: Poster[MoverRequest] | None = None,
) -> None:
    """Answer each `LookUp` until cancelled. `moves` is as for `run_block_manager`."""
    while True:
        for question in await inbox.receive_all():
            found = block_manager.look_up(question, trio.current_time())
            if moves is not None and block_manager.tiers is not None:
                for move in block_manager.tiers.take_moves():
                    moves.post(move)
            await answers.send(found)


async def lend_to_peers(
    block_manager: BlockManager,
    inbox: Receiver[LendingMessage],
    moves: Poster[MoverRequest],
    scheduler: Poster[AnnounceKeys],
) -> None:
    """Lend blocks that other engines fetch, until cancelled. When all are back, a report says that they are free."""
    while True:
        for message in await inbox.receive_all():
            if not isinstance(message, Lend):
                if block_manager.lending.end(message.number):
                    scheduler.post(AnnounceKeys())
            elif (lent := block_manager.lending.lend(message)) is not None:
                moves.post(lent)


async def fetch_from_peers(
    block_manager: BlockManager, inbox: Receiver[Fetch | EndFetch], moves: Poster[MoverRequest]
) -> None:
    """Fetch prompts from other engines ahead of their sequences, until cancelled."""
    while True:
        for message in await inbox.receive_all():
            block_manager.fetch(message)
            if block_manager.tiers is not None:
                for move in block_manager.tiers.take_moves():
                    moves.post(move)


async def end_moves(
    tiers: LowerTiers,
    inbox: Receiver[MoveNews],
    scheduler: Poster[LoadsOver | AnnounceKeys],
    moves: Poster[MoverRequest],
    flush_events: Callable[[], None] | None = None,
) -> None:
    """Apply what has become of each move until cancelled, and wake the scheduler when a load is over, or late.

    It is also woken when there is no more to store in the object store, so that a report tells other engines of it,
    when a tier has been cleared, so that a report tells the supervisor, and by a fetch for which no sequence may have
    come yet.
    """
    while True:
        for news in await inbox.receive_all():
            if isinstance(news, ListedPage | ListingFailed):
                if tiers.objects is not None:
                    tiers.objects.on_listed(news, trio.current_time())
                if isinstance(news, ListingFailed):
                    log.warning("kv_tier.listing_failed", error=news.error)
                continue
            if isinstance(news, TierCleared):
                tiers.by_tier[news.tier].on_cleared(news)
                scheduler.post(AnnounceKeys())
                continue
            over = tiers.on_late(news) if isinstance(news, MoveLate) else tiers.end_move(news)
            for move in tiers.take_moves():
                moves.post(move)
            if tiers.has_shared_news() or tiers.take_fetched():
                scheduler.post(AnnounceKeys())
            for lost in tiers.take_lost():
                log.error("kv_tier.off", tier=lost.tier.value, error=lost.error)
            if isinstance(news, MoveFailed) and (news.wrong or news.error is not None):
                # blocks that a peer or an object store no longer has are computed again: nothing has failed
                is_miss = news.error is None and all(why is LoadFailure.MISSING for why in news.wrong.values())
                say = log.debug if is_miss else log.warning
                say("kv_move.failed", num_wrong=len(news.wrong), error=news.error)
            if isinstance(news, MoveLate) and over is not None:
                log.warning("kv_move.late", num_waiting=len(over.sequence_ids))
            if over is not None:
                scheduler.post(over)
            if flush_events is not None:
                flush_events()
