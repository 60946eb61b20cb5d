"""Files that only their owner may read: how they are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quipu.actors.shared.private_files import PRIVATE, write_private_once


def test_a_key_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is complete on the disk before it has its name, and has its name there before it is used."""
    path, synced = tmp_path / "key", list[tuple[str, bool]]()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_private_once(path, b"first")
    (content, is_named), (folder, has_name) = synced
    assert content.startswith(str(tmp_path / ".key.")) and not is_named
    assert folder == str(tmp_path) and has_name
    write_private_once(path, b"second")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == PRIVATE
    assert list(tmp_path.iterdir()) == [path]
