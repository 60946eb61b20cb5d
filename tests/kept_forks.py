"""Keeps the processes that fork, and that have loaded a tokenizer, for many runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from quipu.actors.engine.executor import grammars
from quipu.actors.fleet.forks.fork_server import ForkServer
from quipu.actors.text_workers import grammar_pool


class KeptForks(ForkServer):
    """Outlives those that use it. Its children end with their sockets."""

    def end(self) -> None:
        pass


@contextmanager
def kept_forks() -> Iterator[None]:
    """Have every runtime in this block use the same processes that fork, which end with the block.

    They must not outlive it: other tests wait until all processes that they started have ended, which they recognize
    by what these have inherited.
    """
    kept: dict[tuple[str, tuple[bytes, ...]], ForkServer] = {}
    started: list[ForkServer] = []

    def start(module: str, *frames: bytes, niceness: int = 0) -> ForkServer:
        if (module, frames) not in kept or not kept[module, frames].is_usable:
            kept[module, frames] = KeptForks.start(module, *frames)
            started.append(kept[module, frames])
        return kept[module, frames]

    starting = mock.Mock(start=start)
    try:
        with (
            mock.patch.object(grammars, "ForkServer", starting),
            mock.patch.object(grammar_pool, "ForkServer", starting),
        ):
            yield
    finally:
        for forks in started:
            ForkServer.end(forks)
