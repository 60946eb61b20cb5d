"""The ranks of an engine other than rank 0, as rank 0 has them: started, told of each pass, watched, ended.

`vllm_loading.py` makes one `Followers`, which is empty without `--tensor-parallel-size`; `vllm_backend.py` tells it of
passes. A follower runs `rank_process.py`.

What must always hold: ranks live and die with the engine's process. A follower is killed by the kernel when the process
that started it ends in whatever way; when a follower ends, a thread here ends this process, which may be waiting for it
in a collective that nothing can interrupt. A follower inherits none of this process's descriptors but its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

import attrs
import torch

from ..backend import BackendConfig
from ..step_errors import RankLost
from .rank_executor import remove_names
from .rank_messages import PassAbandoned, RankPlace

MODULE = "quipu.kernels.vllm_runner.rank_process"
GRACE_S = 5.0
"""How long this process may take to say itself why loading fails, if a follower has said that it does."""
LINGER_S = 0.2
"""For the log's thread to write the last line."""
_LONGEST_WORDS = 4096

T = TypeVar("T")
_log = logging.getLogger(__name__)


@attrs.frozen
class Follower:
    """One process."""

    rank: int
    process: subprocess.Popen[bytes]
    passes: Connection
    moves: Connection
    """For copies of blocks, which do not wait for a pass."""
    last_words: int
    """Descriptor of memory where it writes why it ends."""

    def words(self) -> str:
        return os.pread(self.last_words, _LONGEST_WORDS, 0).decode(errors="replace")


class Followers:
    """All other ranks; none if there is one rank."""

    def __init__(
        self, config: BackendConfig, end_process: Callable[[int], object] = os._exit, module: str | None = None
    ) -> None:
        """Start them; they load at once. `end_process` gets the exit code when one of them ends."""
        size = config.tensor_parallel_size
        self._all: list[Follower] = []
        self._end_process = end_process
        self._is_closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._is_loading = size > 1
        store = None if size == 1 else os.memfd_create("ranks")
        self.leader = RankPlace(0, size, f"quipu-{os.getpid()}-{secrets.token_hex(6)}", store)
        try:
            for rank in range(1, size):
                self._all.append(_start(attrs.evolve(self.leader, rank=rank), config, module or MODULE))
        except BaseException:
            self.close()
            raise
        if self._all:
            self._watching.start()

    def __len__(self) -> int:
        return len(self._all)

    def are_loaded(self) -> None:
        """Note that from now on nobody waits for a follower's reason before this process ends with it."""
        self._is_loading = False

    def tell(self, message: object) -> None:
        """Send a message to each. Raises RankLost if one is gone."""
        if not self._all:
            return
        data = ForkingPickler.dumps(message)
        for follower in self._all:
            self._send(follower.passes, follower, data)

    def receive_each(self, kind: type[T]) -> list[T]:
        """Return the answer of each while loading. Raises RankLost, or MemoryError, with a follower's own reason."""
        return [self._receive(follower.passes, follower, kind) for follower in self._all]

    def move(self, message: object, descriptor: int | None = None) -> None:
        """Send a message about blocks to each, and a descriptor after it."""
        data = ForkingPickler.dumps(message)
        for follower in self._all:
            self._send(follower.moves, follower, data)
            if descriptor is not None:
                with socket.socket(fileno=os.dup(follower.moves.fileno())) as by:
                    socket.send_fds(by, [b"."], [descriptor])

    def moved(self, kind: type[T]) -> list[T]:
        """Return each one's answer to the last `move`."""
        return [self._receive(follower.moves, follower, kind) for follower in self._all]

    @contextmanager
    def entering(self, message: object) -> Iterator[None]:
        """Begin a collective: every follower enters it when it gets this message.

        An error within becomes RankLost.
        """
        self.tell(message)
        with self.together():
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make an error within RankLost: all ranks are in a collective, or about to enter one."""
        if not self._all:
            yield
            return
        try:
            yield
        except Exception as error:
            raise RankLost(f"rank 0 of {self.leader.size} failed in a pass: {type(error).__name__}: {error}") from error

    def abandon(self) -> None:
        """Tell them that what was told last is void, if they wait for what was drawn."""
        with suppress(RankLost):
            self.tell(PassAbandoned())

    def close(self) -> None:
        """End them, and wait until they have ended."""
        self._is_closing.set()
        for follower in self._all:
            follower.process.kill()
            follower.process.wait()
        if self._watching.is_alive():
            self._watching.join()  # it may be reading the last words of one that ended by itself
        for follower in self._all:
            follower.passes.close()
            follower.moves.close()
            os.close(follower.last_words)
        self._all.clear()
        # its descriptor stays: torch opens the store by its number again, even in order to destroy it
        if self.leader.store is not None:
            remove_names(self.leader.name)

    def _send(self, connection: Connection, follower: Follower, data: memoryview) -> None:
        try:
            connection.send_bytes(data)
        except OSError as error:
            raise RankLost(f"rank {follower.rank} cannot be told: {error}") from error

    def _receive(self, connection: Connection, follower: Follower, kind: type[T]) -> T:
        try:
            answer = connection.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                follower.process.wait(GRACE_S)
            reason = f"rank {follower.rank} has ended: {_how_it_ended(follower)}"
            lacked_memory = follower.process.returncode == os.EX_TEMPFAIL
            raise MemoryError(reason) if lacked_memory else RankLost(reason) from error
        if not isinstance(answer, kind):
            raise RankLost(f"rank {follower.rank} has answered {answer} instead of {kind.__name__}")
        return answer

    def _watch(self) -> None:
        """Wait until a follower ends, then end this process."""
        poll, by_fd = select.poll(), {}
        for follower in list(self._all):
            with suppress(ProcessLookupError):
                by_fd[pidfd := os.pidfd_open(follower.process.pid)] = follower
                poll.register(pidfd, select.POLLIN)
        if not by_fd:
            return
        found, _ = poll.poll()[0]
        ended = by_fd[found]
        for pidfd in by_fd:
            os.close(pidfd)
        if self._is_closing.is_set():
            return
        with suppress(subprocess.TimeoutExpired):
            ended.process.wait(GRACE_S)
        # one that had something to say while loading was refused, and so, most likely, is this process
        if self._is_loading and ended.words() and self._is_closing.wait(GRACE_S):
            return
        _log.error("rank %d of %d has ended: %s", ended.rank, self.leader.size, _how_it_ended(ended))
        time.sleep(LINGER_S)
        self._end_process(os.EX_TEMPFAIL if ended.process.returncode == os.EX_TEMPFAIL else 1)


def _how_it_ended(follower: Follower) -> str:
    code = follower.process.returncode
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    words = follower.words()
    return f"{how}: {words}" if words else how


def _start(place: RankPlace, config: BackendConfig, module: str) -> Follower:
    """Start a follower and send it its configuration."""
    passes, its_passes = _connect()
    moves, its_moves = _connect()
    last_words = os.memfd_create(f"rank {place.rank}")
    given = (its_passes.fileno(), its_moves.fileno(), last_words)
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // place.size))
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of ours
            [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, given)],
            pass_fds=given if place.store is None else (*given, place.store),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    finally:
        its_passes.close()
        its_moves.close()
    follower = Follower(place.rank, process, passes, moves, last_words)
    passes.send((place, config))
    return follower


def _connect() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Connection(ours.detach()), Connection(theirs.detach())
