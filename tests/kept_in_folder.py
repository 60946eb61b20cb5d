"""What the tests of one folder share across files, such as servers, and what ends with the last of them.

A fixture of the whole session would keep it for as long as its worker tests other folders, minutes in which even what
idles takes processor time from all tests. (`package` is no such scope here: a folder of tests without an `__init__.py`
is no package, so that pytest would take the session.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")


class KeptInFolder(Generic[P, T]):
    """A context that is entered when a test first needs it; a plugin, which leaves it behind the folder's last test."""

    def __init__(self, folder: Path, enter: Callable[P, AbstractContextManager[T]]) -> None:
        self._folder = folder
        self._enter = enter
        self._left = ExitStack()
        self._value: T | None = None

    def get(self, *arguments: P.args, **options: P.kwargs) -> T:
        """Return what the context has returned. The arguments matter for the first call only."""
        if self._value is None:
            self._value = self._left.enter_context(self._enter(*arguments, **options))
        return self._value

    @pytest.hookimpl(trylast=True)  # fixtures that use it end before
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        if self._value is not None and (nextitem is None or not nextitem.path.is_relative_to(self._folder)):
            self.leave()

    def pytest_sessionfinish(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the context, if it was entered; the next test that needs it enters it again."""
        self._value = None
        self._left.close()
