"""Has the launcher of servers fork the engines and helpers that a test's own process starts.

Otherwise each starts an interpreter and loads what it needs: two seconds of processor time for an engine, up to half a
second for a helper. They are the same programs with the same arguments, and children of the launcher.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.e2e.launcher import launch_engine
from tests.e2e.spare_processes import is_of_a_server


@contextmanager
def forked_children() -> Iterator[None]:
    """Have processes that are started in this block forked, if they are of a kind that servers start."""
    start = subprocess.Popen

    def start_or_fork(command: Any, *more: Any, **options: Any) -> Any:
        if is_of_a_server(command):
            return launch_engine(command, *more, **options)
        return start(command, *more, **options)

    with mock.patch.object(subprocess, "Popen", start_or_fork):
        yield
