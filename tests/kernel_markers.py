"""The marker for tests that need the CPU kernels.

The reason of a skip says what is missing: a compiler, or processor instructions.
"""

from __future__ import annotations

import pytest

from quipu.kernels.cpu.build import CannotBuild, load_kernels

_OLD_COMPILER = ("unrecognized command", "unknown argument")


def why_missing(error: CannotBuild) -> str:
    """Return why kernels are missing on this machine; raise the error if it is the sources that are wrong."""
    if "failed:" in str(error) and not any(said in str(error) for said in _OLD_COMPILER):
        raise error
    return str(error)


def _missing_reason() -> str:
    try:
        load_kernels()
    except CannotBuild as error:
        return f"no CPU kernels: {why_missing(error)}"
    return ""


MISSING = _missing_reason()
"""Why there are no CPU kernels here; empty if there are."""
needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)  # no compiler or no AVX2; the reason says which
