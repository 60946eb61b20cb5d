"""Keeps the processes that fork, and that have loaded a tokenizer, for many runtimes of one test."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

from quipu.actors.executor import grammars
from quipu.actors.forks.fork_server import ForkServer
from quipu.actors.text_workers import grammar_pool


class KeptForks(ForkServer):
    """Outlives those that use it. Its children end with their sockets."""

    def end(self) -> None:
        pass


@cache
def _kept(module: str, frames: tuple[bytes, ...]) -> ForkServer:
    forks = KeptForks.start(module, *frames)
    atexit.register(ForkServer.end, forks)
    return forks


@contextmanager
def kept_forks() -> Iterator[None]:
    """Have every runtime in this block use the same processes that fork."""

    def start(module: str, *frames: bytes, niceness: int = 0) -> ForkServer:
        if not _kept(module, frames).is_usable:
            _kept.cache_clear()
        return _kept(module, frames)

    starting = mock.Mock(start=start)
    with mock.patch.object(grammars, "ForkServer", starting), mock.patch.object(grammar_pool, "ForkServer", starting):
        yield
