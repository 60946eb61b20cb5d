"""A store for each test, closed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.response_store.stores import Store, open_tables


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_tables(tmp_path)
    yield store
    store.connection.close()
