"""Opens the tiers below the device: for each, the KV-block manager's index and the mover's store.

Called by `engine.py`.

What must always hold: an index has as many slots as its store; a tier that outlives the process is opened with a digest
of everything that the bits of its blocks depend on.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import attrs
import structlog

from ..config.engine_config import EngineConfig
from ..fleet.cluster.weights_digest import weights_digest
from ..messages.tiers import Tier
from .block_manager.host_index import HostIndex
from .block_manager.load_costs import LoadCosts, LoadPolicy, fixed_costs_of
from .block_manager.lower_tier import LowerTier, TierPlan
from .block_manager.object_index import ObjectIndex
from .block_manager.segment_index import SegmentIndex, StoredLog
from .block_manager.write_behind import StorePolicy, WriteBehind
from .executor.loading import check_host_memory, numerics_of
from .executor.step_runner import Executor
from .mover.block_carrier import BlockCarrier
from .mover.block_header import numerics_digest
from .mover.disk_store import DiskStore
from .mover.host_store import HostStore
from .mover.peer_copies import PeerCopies
from .mover.remote_index import RemoteIndex
from .mover.slot_store import SlotStore
from .mover.write_rate import RateLimit

log = structlog.get_logger()

STEPS_STORED_AHEAD = 2
"""How many of the largest steps may evict blocks while a copy to the host is under way, until one evicts what has no
copy."""
LEAST_WAITING = 1024
"""Blocks that may wait to be stored, if the device and the host have less."""


@attrs.frozen
class OpenTiers:
    """The lower tiers of one engine."""

    plan: TierPlan
    """For the block manager."""
    carrier: BlockCarrier | None
    """For the mover. None: there are no tiers, and no peers."""
    write_rate: RateLimit | None
    """Of the disk."""
    copies: PeerCopies | None = None
    """For blocks to and from other engines. None: there are none."""


class TiersRefused(ValueError):
    """The tiers that the configuration asks for cannot be opened; the message names the flag."""


def open_tiers(config: EngineConfig, executor: Executor) -> OpenTiers:
    """Open what `config` asks for.

    Raises TiersRefused if a tier would not hold a block, there is no memory for it, or its folder or bucket cannot be
    used, and MemoryError if no memory can be had.
    """
    if not (config.lower_tiers or config.has_peers):
        return OpenTiers(TierPlan(), None, None)
    try:
        return _open_tiers(config, executor)
    except ValueError as error:
        raise TiersRefused(str(error)) from error


def _open_tiers(config: EngineConfig, executor: Executor) -> OpenTiers:
    backend = executor.backend
    plan = backend.memory_plan
    weights = config.checkpoint_name or config.model_path  # enough for tiers that end with the server
    if config.kv_disk is not None or config.kv_remote is not None:
        weights = _weights_digest(config)
    weights = json.dumps([weights, config.load_format, config.quantization])
    numerics = numerics_digest(numerics_of(backend.capabilities), weights, plan.block_size, plan.block_bytes)
    tiers: list[LowerTier] = []
    stores: dict[Tier, SlotStore] = {}
    num_host_blocks = num_host_blocks_of(config.kv_host_memory, plan.block_bytes)
    if num_host_blocks:
        memory = backend.allocate_on_host(num_host_blocks)
        stores[Tier.HOST] = HostStore(memory, [None] * num_host_blocks, plan.block_bytes)
        tiers.append(LowerTier(Tier.HOST, HostIndex(num_host_blocks)))
    most_waiting, policy = max(plan.num_blocks + num_host_blocks, LEAST_WAITING), StorePolicy(config.kv_store)
    if config.kv_disk is not None:
        disk = DiskStore(
            Path(config.kv_disk),
            num_bytes=config.kv_disk_size or 0,
            block_bytes=plan.block_bytes,
            numerics=numerics,
        )
        stores[Tier.DISK] = disk
        index = SegmentIndex(disk.num_slots // disk.blocks_per_segment, disk.blocks_per_segment, _log_of(disk))
        log.info(
            "kv_disk.opened",
            folder=str(disk.folder),
            num_blocks=disk.num_slots,
            num_found=len(disk.stored),
            num_discarded=disk.discarded.num_segments,
        )
        queue = WriteBehind(index, policy, most_waiting)
        tiers.append(LowerTier(Tier.DISK, index, queue))
    if config.kv_remote is not None:
        from .mover.remote_opening import open_remote_store  # needs an extra

        remote = open_remote_store(
            config.kv_remote,
            None if config.kv_remote_secret is None else Path(config.kv_remote_secret),
            None if config.kv_remote_encrypt is None else Path(config.kv_remote_encrypt),
            numerics=numerics,
            block_bytes=plan.block_bytes,
        )
        stores[Tier.REMOTE] = remote
        objects = ObjectIndex(RemoteIndex(remote.names))
        tiers.append(LowerTier(Tier.REMOTE, objects, WriteBehind(objects, policy, most_waiting), is_local=False))
    carrier = BlockCarrier(
        backend,
        executor.tags,
        stores,
        block_size=plan.block_size,
        block_bytes=plan.block_bytes,
        numerics=numerics,
        is_fatal=executor.is_fatal,
    )
    rate = config.kv_disk_write_rate
    block_size = plan.block_size
    wanted = TierPlan(
        tiers,
        num_stored_ahead=STEPS_STORED_AHEAD * -(-config.max_num_batched_tokens // block_size),
        costs=LoadCosts(LoadPolicy(config.kv_load), block_size, fixed_costs_of(config.kv_load_costs)),
        has_peers=config.has_peers,
        quota_blocks=None if config.kv_quota is None else max(1, config.kv_quota // plan.block_bytes),
    )
    copies = None
    if config.has_peers:
        copies = PeerCopies(backend, executor.tags, plan.block_size, plan.block_bytes, numerics, executor.is_fatal)
    return OpenTiers(wanted, carrier, None if rate is None else RateLimit(rate, rate, 0.0), copies)


def num_host_blocks_of(num_bytes: int | None, block_bytes: int) -> int:
    """Return how many blocks a host tier of `num_bytes` holds; None: there is to be none.

    Raises ValueError for too few bytes, or more than there are.
    """
    if num_bytes is None:
        return 0
    check_host_memory(num_bytes)
    if num_bytes < block_bytes:
        raise ValueError(f"kv_host_memory={num_bytes} holds no block: one has {block_bytes} bytes")
    return num_bytes // block_bytes


def _weights_digest(config: EngineConfig) -> str:
    """Return a digest of the contents of the weights. Raises CheckpointError."""
    if config.executor == "fake":
        return "fake"
    memo = None if config.kv_disk is None else Path(config.kv_disk) / "weights.json"
    started = time.perf_counter()
    digest = weights_digest(Path(config.model_path), load_format=config.load_format, memo=memo)
    log.info("kv_tier.weights_digest", digest=digest[:16], seconds=round(time.perf_counter() - started, 3))
    return digest


def _log_of(disk: DiskStore) -> StoredLog:
    """Return what a disk holds, and where writing goes on."""
    size = disk.blocks_per_segment
    stored = [(found.slot, found.key) for found in disk.stored]
    if not (stored or disk.blank):
        return StoredLog()
    head = (disk.blank.stop - 1) // size if disk.blank else max(slot for slot, _ in stored) // size
    return StoredLog(stored, head, size - len(disk.blank))
