"""The cache of compiled kernels: a library that another user could have written is never loaded.

The compiler is a fake, because these tests do not depend on the processor or on a real compiler.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quipu.kernels.cpu.compiling import build
from quipu.kernels.cpu.instruction_sets import InstructionSet

PLAIN = InstructionSet("plain", frozenset(), ())
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo fake && exit 0
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the empty cache folder; private folders that replace it are made under `elsewhere`."""
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    return tmp_path / "cache" / "quipu"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_private_cache_is_reused(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reuse our own cache without a warning, whatever the umask."""
    before = os.umask(0o002)
    try:
        library = build(PLAIN)
    finally:
        os.umask(before)
    library.write_text("kept")
    assert build(PLAIN) == library
    assert library.read_text() == "kept"
    assert library.parent == cache
    assert warnings(caplog) == []


def test_progress_of_compiling(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every file is counted as it is compiled; nothing is if everything is compiled already."""
    caplog.set_level(logging.INFO, "quipu.kernels")
    seen: list[tuple[int, int]] = []
    build(PLAIN, lambda num_done, total: seen.append((num_done, total)))
    total = seen[0][1]
    assert seen == [(num_done, total) for num_done in range(total + 1)] and total > 1
    assert caplog.messages[0] == f"compiling the CPU kernels for plain, once on this machine: {total} files"
    build(PLAIN, lambda num_done, total: seen.append((num_done, total)))
    assert len(seen) == total + 1


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o720], ids=oct)
@pytest.mark.parametrize("folder", [".", "objects"])
def test_folder_writable_by_others(cache: Path, folder: str, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Neither read nor write the folder; warn, and use a private one instead."""
    planted = build(PLAIN)
    planted.write_text("planted")
    (cache / folder).chmod(mode)
    library = build(PLAIN)
    assert library.read_text() == "compiled\n"
    assert library.parent.parent == cache.parent.parent / "elsewhere"
    assert library.parent.stat().st_mode & 0o077 == 0
    (warning,) = warnings(caplog)
    assert str(cache / folder) in warning
    assert "written by others" in warning


@pytest.mark.parametrize("which", ["*.so", "objects/*.o"])
@pytest.mark.parametrize("mode", [0o775, 0o757], ids=oct)
def test_file_writable_by_others(cache: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Compile the file again in its place, and name it in a warning."""
    library = build(PLAIN)
    planted = next(iter(cache.glob(which)))
    planted.write_text("planted")
    planted.chmod(mode)
    if planted != library:
        library.unlink()
    assert build(PLAIN) == library
    assert planted.read_text() == "compiled\n"
    assert planted.stat().st_mode & 0o022 == 0
    (warning,) = warnings(caplog)
    assert str(planted) in warning


def owned_by(owner: int) -> Callable[[], int]:
    return lambda: owner


def test_cache_of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Do not use a cache that belongs to neither this user nor root."""
    build(PLAIN).write_text("planted")
    owner = 12345
    os.chown(cache, owner, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", owned_by(os.getuid() + 1))
    assert build(PLAIN).read_text() == "compiled\n"
    assert any(str(cache) in warning and "another user" in warning for warning in warnings(caplog))
