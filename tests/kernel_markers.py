"""The marker for tests that need the CPU kernels.

The reason of a skip says what is missing: a compiler, or processor instructions.
"""

from __future__ import annotations

import pytest

from quipu.kernels.cpu.build import CannotBuild, load_kernels


def _why_not() -> str:
    try:
        load_kernels()
    except CannotBuild as error:
        return f"no CPU kernels: {error}"
    return ""


_missing = _why_not()
needs_kernels = pytest.mark.skipif(bool(_missing), reason=_missing)
