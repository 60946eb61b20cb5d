"""Faults of the tiers that outlive an engine: bytes of a disk's files change, and a bucket is gone for a while."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from threading import Event

import attrs

PAUSE_S = (0.2, 1.5)
"""Between two faults."""
GONE_S = 1.0
"""How long a bucket is away."""
SECRET_BYTES = 32


@attrs.define
class Tiers:
    """The disk and the bucket of one server, and what was done to them."""

    folder: Path
    counts: Counter[str] = attrs.field(factory=Counter)

    def flags(self, disk_size: str) -> list[str]:
        """Return the flags of a server that has them."""
        secret = self.folder / "secret"
        secret.write_bytes(os.urandom(SECRET_BYTES))
        secret.chmod(0o600)
        return [
            *("--kv-disk", str(self.folder / "kv"), "--kv-disk-size", disk_size),
            *("--kv-remote", f"file://{self.folder / 'bucket'}", "--kv-remote-secret", str(secret)),
        ]

    def disturb(self, rng: random.Random, stopping: Event) -> None:
        """Change bytes and take the bucket away, one after the other, until `stopping` is set."""
        while not stopping.wait(rng.uniform(*PAUSE_S)):
            if rng.random() < 0.7:
                self._change_a_byte(rng)
            else:
                self._take_bucket_away(stopping)

    def _change_a_byte(self, rng: random.Random) -> None:
        files = [path for path in self.folder.glob("kv/engine-*/segment-*") if path.stat().st_size]
        if not files:
            return
        path = rng.choice(files)
        try:
            with path.open("r+b") as file:
                at = rng.randrange(os.fstat(file.fileno()).st_size)
                (before,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([before ^ 1 << rng.randrange(8)]), at)
        except (OSError, ValueError):  # the file is gone, or empty by now
            return
        self.counts["bytes changed on disk"] += 1

    def _take_bucket_away(self, stopping: Event) -> None:
        bucket, away = self.folder / "bucket", self.folder / "away"
        if not bucket.is_dir():
            return
        bucket.rename(away)
        bucket.write_bytes(b"this is no folder")
        stopping.wait(GONE_S)
        bucket.unlink()
        away.rename(bucket)
        self.counts["bucket away"] += 1
