"""A machine that can start no thread for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from quipu.actors import threads


class Shortage:
    """Takes the place of `trio.to_thread.run_sync`, and raises `errors` in its first calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self._run, self.errors, self.num_tries = trio.to_thread.run_sync, list(errors), 0
        monkeypatch.setattr(threads, "FIRST_PAUSE_S", 0.0)
        monkeypatch.setattr(trio.to_thread, "run_sync", self.run_sync)

    async def run_sync(self, call: Callable[[], Any], **options: Any) -> Any:
        self.num_tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return await self._run(call, **options)
