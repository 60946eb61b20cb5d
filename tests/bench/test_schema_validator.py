"""The validator of outputs in `bench.structured`: numbers are checked exactly."""

from __future__ import annotations

import pytest

from bench.structured.validator import Validator


@pytest.mark.parametrize(
    ("value", "is_valid"), [(-25466804719814112.0, True), (25466804719814108.0, False), (4.5, True), (0.75, False)]
)
def test_multiples(value: float, is_valid: bool) -> None:
    """A large number is checked by all of its digits, although Python writes at most 17 of them."""
    assert Validator({"multipleOf": 1.5}).is_valid(value) == is_valid


def test_decimals() -> None:
    """A fraction is checked as it is written, not as the nearest double."""
    assert Validator({"multipleOf": 0.01}).is_valid(0.07) and not Validator({"multipleOf": 0.01}).is_valid(0.075)
