"""Servers and browsers of a folder end with its last test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from tests.kept_in_folder import KeptInFolder

FOLDER = Path("tests/some")


def item_at(path: str) -> mock.Mock:
    return mock.Mock(spec=pytest.Item, path=Path(path))


def test_entered_when_needed_and_left_behind_the_last_test() -> None:
    """It is entered once for all files of the folder, left when another folder or nothing follows, and entered anew."""
    seen: list[str] = []

    @contextmanager
    def server(name: str) -> Iterator[str]:
        seen.append(f"{name} starts")
        yield name
        seen.append(f"{name} ends")

    kept = KeptInFolder(FOLDER, server)
    kept.pytest_runtest_teardown(nextitem=None)
    assert kept.get("first") == kept.get("second") == "first"
    kept.pytest_runtest_teardown(nextitem=item_at("tests/some/deeper/test_b.py"))
    assert kept.get("third") == "first" and seen == ["first starts"]
    kept.pytest_runtest_teardown(nextitem=item_at("tests/something/test_c.py"))
    assert seen == ["first starts", "first ends"]
    assert kept.get("fourth") == "fourth"
    kept.pytest_runtest_teardown(nextitem=None)
    kept.pytest_sessionfinish()
    assert seen == ["first starts", "first ends", "fourth starts", "fourth ends"]


def test_nothing_is_kept_of_what_does_not_start() -> None:
    """An error while it is entered is the test's, and the next test tries again."""
    starts = mock.MagicMock(side_effect=[OSError("no port"), mock.DEFAULT])
    kept = KeptInFolder(FOLDER, starts)
    with pytest.raises(OSError, match="no port"):
        kept.get()
    assert kept.get() is starts.return_value.__enter__.return_value
    kept.leave()
    assert starts.return_value.__exit__.called
