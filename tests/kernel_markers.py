"""The marker for tests that need the CPU kernels.

The reason of a skip says what is missing: a compiler, or processor instructions.
"""

from __future__ import annotations

import pytest

from quipu.kernels.cpu.build import CannotBuild, load_kernels


def _missing_reason() -> str:
    try:
        load_kernels()
    except CannotBuild as error:
        return f"no CPU kernels: {error}"
    return ""


_missing = _missing_reason()
needs_kernels = pytest.mark.skipif(bool(_missing), reason=_missing)  # no compiler or no AVX2; the reason says which
