"""The faults that `make mutants` plants still fit the code that they are planted in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.mutants import find_patches, find_traps

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_every_patch_applies() -> None:
    """Every patch applies to the current code."""
    patches = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
    stale = []
    for patch in patches:
        check = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, check=False)
        if check.returncode:
            stale.append(patch.name)
    assert len(patches) > 40 and not stale


def test_every_trap_has_a_patch() -> None:
    """Every trap has a patch that plants its fault, and every patch has a trap."""
    assert find_patches() == set(find_traps())
