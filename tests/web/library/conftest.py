"""Engines of these tests are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked_children import forked_children


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    """Have engines and what they need forked by the launcher."""
    with forked_children():
        yield
