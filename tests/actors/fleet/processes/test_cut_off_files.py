"""Which files of a checkpoint are shorter than their headers say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from quipu.actors.fleet.processes.process_host import find_cut_off
from tests.tiny import TINY

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TINY / FILE, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_whole_files(folder: Path) -> None:
    """Complete files, files with extra bytes, and folders without weights are not reported."""
    assert find_cut_off(folder) is None
    with (folder / FILE).open("ab") as file:
        file.write(b"more")
    assert find_cut_off(folder) is None
    (folder / FILE).unlink()
    assert find_cut_off(folder) is None
    assert find_cut_off(folder / "nothing") is None


@pytest.mark.parametrize("num_left", [0, 4, 8, 20, 1000, -4096, -1])
def test_cut_off_anywhere(folder: Path, num_left: int) -> None:
    """A file cut off anywhere, within its header or after it, is named."""
    size = (folder / FILE).stat().st_size
    os.truncate(folder / FILE, num_left % size)
    found = find_cut_off(folder)
    assert found is not None and found.startswith(FILE)
    if num_left < 0:
        assert found == f"{FILE} is cut off: it has {size + num_left} bytes, and its header says {size}"


def test_file_that_cannot_be_read(folder: Path) -> None:
    """If a file cannot be read, the operating system's reason is returned."""
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    assert "Is a directory" in (find_cut_off(folder) or "")
