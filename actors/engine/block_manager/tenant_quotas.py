"""How much of the lower tiers one tenant may have, and which of its blocks leave when it has more.

Part of `lower_tiers.py`, which has them if `--kv-quota` is given. `BlockOwners` remembers whose each block is, as long
as the block is in any tier; a `TierQuota` counts one tier's blocks by tenant.

    stored ──▶ counted for its tenant ──▶ over its quota: the tenant's least recently used block leaves the tier

What must always hold: no tenant's blocks leave because of what another one stores; a block has one owner, since no two
tenants share a key; a block of an earlier life of the engine belongs to nobody until a prompt finds it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...messages.tiers import Tier
from .publications import Allocation


class BlockOwners:
    """The tenant of each block. An observer of the pool."""

    def __init__(self, allocations: Mapping[int, Allocation]) -> None:
        """`allocations`: those of all sequences that hold blocks."""
        self._allocations = allocations
        self._owners: dict[bytes, str] = {}
        self._num_tiers: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, key: bytes) -> str | None:
        return self._owners.get(key)

    def claim(self, keys: Iterable[bytes], tenant: str) -> list[bytes]:
        """Give blocks that belong to nobody to the tenant that has found them. Return them."""
        claimed = [key for key in keys if key not in self._owners and key in self._num_tiers]
        self._owners.update(dict.fromkeys(claimed, tenant))
        return claimed

    # ------------------------------------------------------------ observer of the pool

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self._num_tiers.update(keys)
        writer = self._allocations.get(sequence_id) if tier is Tier.DEVICE else None
        if writer is not None:
            for key in keys:
                self._owners.setdefault(key, writer.tenant)

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        for key in keys:
            self._num_tiers[key] -= 1
            if self._num_tiers[key] <= 0:
                del self._num_tiers[key]
                self._owners.pop(key, None)

    def on_cleared(self) -> None:
        self._num_tiers.clear()
        self._owners.clear()


class TierQuota:
    """The blocks of one tier by tenant, each tenant's least recently used first."""

    def __init__(self, owners: BlockOwners, max_blocks: int, is_pinned: Callable[[bytes], bool]) -> None:
        """`max_blocks`: of one tenant. Pinned blocks leave last."""
        self._owners = owners
        self._max_blocks = max_blocks
        self._is_pinned = is_pinned
        self._keys_of: dict[str, OrderedDict[bytes, None]] = {}

    def num_blocks(self, tenant: str) -> int:
        return len(self._keys_of.get(tenant, ()))

    def add(self, keys: Iterable[bytes]) -> list[bytes]:
        """Count blocks that are in the tier from now on. Return those that have to leave it."""
        leaving: list[bytes] = []
        for key in keys:
            tenant = self._owners.find(key)
            if tenant is None:
                continue
            own = self._keys_of.setdefault(tenant, OrderedDict())
            own[key] = None
            own.move_to_end(key)
            if len(own) > self._max_blocks:
                oldest = next((key for key in own if not self._is_pinned(key)), next(iter(own)))
                del own[oldest]
                leaving.append(oldest)
        return leaving

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks, those of them that are counted, were used."""
        for key in keys:
            own = self._keys_of.get(self._owners.find(key) or "")
            if own is not None and key in own:
                own.move_to_end(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are in the tier no more. To be called before their owners are forgotten."""
        for key in keys:
            tenant = self._owners.find(key)
            own = self._keys_of.get(tenant) if tenant is not None else None
            if tenant is not None and own is not None:
                own.pop(key, None)
                if not own:
                    del self._keys_of[tenant]

    def clear(self) -> None:
        self._keys_of.clear()
