"""The tiers of the KV cache, and what an engine reports of those below the device.

Used by the engine, which moves blocks between tiers, and by what reports them: accountant, router, KV events.

What must always hold: a tier is called the same in usage, records, metrics, look-ups and the ledger; a load that failed
has exactly one reason.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where the KV of a block lies."""

    DEVICE = "device"
    HOST = "host"
    """The host's memory (`--kv-host-memory`)."""
    DISK = "disk"
    """A disk of the engine's machine."""
    REMOTE = "remote"
    """An object store that engines share."""
    PEER = "peer"
    """Another engine's device: a source of loads only. What comes from there is nobody's cache hit."""


LOWER_TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)
"""All below the device, fastest first."""
OWN_LOWER_TIERS = (Tier.HOST, Tier.DISK)
"""Those of an engine alone; the object store is all engines'."""
CACHE_TIERS = (Tier.DEVICE, *LOWER_TIERS)
"""Where cache hits come from."""

TierSpans = dict[str, list[int]]
"""The reused positions that were loaded from lower tiers, by tier: start, end, start, end, in ascending order. A tier
that brought none is left out."""


def num_positions(spans: list[int]) -> int:
    """Return the number of positions in spans: start, end, start, end."""
    return sum(spans[1::2]) - sum(spans[::2])


class LoadFailure(StrEnum):
    """Why a block that was asked for did not come. Its tokens are computed, and count so."""

    MISSING = "missing"
    """It is not there any more: its place is empty."""
    CORRUPT = "corrupt"
    """Its header is another block's, or its bytes do not have the checksum that was written with them."""
    LATE = "late"
    """It did not come in time, and nobody waits for it any longer."""
    FAILED = "failed"
    """It could not be read or written: no memory, say."""


class TierReport(msgspec.Struct, array_like=True, frozen=True):
    """A lower tier when a report is made, and what happened in it since the report before."""

    tier: Tier
    num_blocks: int
    """As many as it can hold."""
    num_used: int
    """Those that can be found, or are being stored."""
    num_stored: int = 0
    num_loaded: int = 0
    """Blocks that were copied from it to the device, and found to be right."""
    num_evicted: int = 0
    """Blocks that were evicted for others."""
    failed_loads: dict[str, int] = {}
    """Blocks that did not come, by `LoadFailure`."""
    is_stale: bool = False
    """Its memory may still hold what it held before a reset of the cache: another life of the engine would find it."""
