"""Equality of results that were computed twice: exact, or but for the last bits where those depend on the batch."""

from __future__ import annotations

import math
from typing import Any

import attrs

from tests.tiny import EXECUTOR

NEAR = 1e-3
"""How far two logprobs of one token may be apart in float32."""


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two results are equal; on vLLM, which is not invariant, fractions need only be near."""
    return _near(ours, theirs) if EXECUTOR == "vllm" else bool(ours == theirs)


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert `same`."""
    assert ours == theirs or (EXECUTOR == "vllm" and _near(ours, theirs))


def _near(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=0, abs_tol=NEAR)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_near(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_near, ours, theirs))
    if attrs.has(type(ours)) and type(ours) is type(theirs):
        names = [field.name for field in attrs.fields(type(ours)) if field.eq]
        return all(_near(getattr(ours, name), getattr(theirs, name)) for name in names)
    return bool(ours == theirs)
