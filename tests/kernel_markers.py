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


MISSING = _missing_reason()
"""Why there are no CPU kernels here; empty if there are."""
needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)  # no compiler or no AVX2; the reason says which
