"""The settings of the KV cache's tiers below the device. Part of `engine_config.py`.

What must always hold: whatever an operator can set is declared with `setting`, and nowhere else.
"""

from __future__ import annotations

from typing import Final

import attrs

from .declarations import setting, settings_of

MOST_STAGED_BLOCKS: Final = 108
"""Blocks for which an engine has buffers in the host's memory, at most, on their way to and from a disk or an object
store (`engine/mover/staging.py`)."""


@attrs.frozen(kw_only=True)
class TierSettings:
    kv_host_memory: int | None = setting(
        None,
        "--kv-host-memory",
        reader="size",
        metavar="SIZE",
        help="host memory of each engine for KV blocks evicted from the device, where later prompts find them, for "
        "example 16GiB (docs/operate/tiers.md)",
        group="tiers",
    )
    kv_disk: str | None = setting(
        None,
        "--kv-disk",
        metavar="PATH",
        help="folder on a local disk in which each engine keeps KV blocks, which outlive it (docs/operate/tiers.md)",
        group="tiers",
    )
    kv_disk_size: int | None = setting(
        None,
        "--kv-disk-size",
        reader="size",
        metavar="SIZE",
        help="bytes that each engine may use of --kv-disk, for example 500GiB",
        group="tiers",
    )
    kv_disk_write_rate: int | None = setting(
        None,
        "--kv-disk-write-rate",
        reader="size",
        metavar="SIZE",
        help="bytes that each engine may write to --kv-disk in a second, for example 200MiB",
        resolved="unlimited",
        group="tiers",
    )
    kv_remote: str | None = setting(
        None,
        "--kv-remote",
        metavar="URL",
        help="object store in which servers share KV blocks: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER; "
        "needs the extra `remote` (docs/operate/tiers.md)",
        group="tiers",
    )
    kv_remote_secret: str | None = setting(
        None,
        "--kv-remote-secret",
        metavar="FILE",
        help="secret that the servers of one deployment share: names of objects are made with it, and objects are "
        "authenticated",
        group="tiers",
    )
    kv_remote_encrypt: str | None = setting(
        None,
        "--kv-remote-encrypt",
        metavar="KEYFILE",
        help="32 bytes, with which objects are encrypted (AES-GCM), for buckets that others can read",
        group="tiers",
    )
    kv_store: str = setting(
        "all",
        "--kv-store",
        choices=("all", "reused"),
        help="KV blocks to store in tiers that outlive the engine: all, or those of long prompts, pinned ones, and "
        "those that a second prompt has in common",
        group="tiers",
    )

    kv_quota: int | None = setting(
        None,
        "--kv-quota",
        reader="size",
        metavar="SIZE",
        help="bytes of KV blocks that one tenant may have in each tier of each engine below the device",
        resolved="all of it",
        group="tiers",
    )
    kv_load: str = setting(
        "auto",
        "--kv-load",
        choices=("always", "auto", "never"),
        help="when to load KV blocks from lower tiers; `auto`: where that is faster than computing them, as measured",
        group="tiers",
    )
    kv_load_costs: str | None = setting(None, "--kv-load-costs", group="tiers")
    """For tests: JSON with costs to decide by instead of measured ones: `compute_s` per token, and by tier `latency_s`
    and `block_s`."""

    @property
    def lower_tiers(self) -> list[str]:
        """Names of the tiers below the device, the fastest first."""
        tiers = {"host": self.kv_host_memory, "disk": self.kv_disk, "remote": self.kv_remote}
        return [tier for tier, setting in tiers.items() if setting is not None]

    @property
    def num_staged_blocks(self) -> int:
        return 0 if self.kv_disk is None and self.kv_remote is None else MOST_STAGED_BLOCKS


TIER_FLAGS = {declared.attribute: declared.flags[0] for declared in settings_of(TierSettings)}
"""By setting, the flag that operators know it by."""
