"""The judge of outputs in `bench.structured`: numbers are judged as they are."""

from __future__ import annotations

import pytest

from bench.structured.validator import Validator


@pytest.mark.parametrize(
    ("value", "is_valid"), [(-25466804719814112.0, True), (25466804719814108.0, False), (4.5, True), (0.75, False)]
)
def test_multiples(value: float, is_valid: bool) -> None:
    """A large number is judged by all of its digits, of which Python writes the first 17 at most."""
    assert Validator({"multipleOf": 1.5}).is_valid(value) == is_valid


def test_decimals() -> None:
    """A fraction is judged as it is written, not as the double next to it."""
    assert Validator({"multipleOf": 0.01}).is_valid(0.07) and not Validator({"multipleOf": 0.01}).is_valid(0.075)
