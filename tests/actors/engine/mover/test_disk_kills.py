"""A process that writes to a disk store is killed: what it leaves is right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from . import disk_kills


@pytest.mark.parametrize(("block_bytes", "num_kills"), [(8192, 15), (1 << 17, 5)])
def test_killed_writers(block_bytes: int, num_kills: int) -> None:
    """After each of many kills at drawn moments, all that is found reads right, and nothing that was reported as
    written is missing."""
    options = ["--kills", str(num_kills), "--block-bytes", str(block_bytes)]
    result = subprocess.run(
        [sys.executable, "-m", disk_kills.__name__, *options],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Kills(num_kills={num_kills}, ")
