"""Processes forked on request: how they end, what happens if none can be forked, and that none is left."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.actors.engine.executor.grammars import MODULE
from quipu.actors.fleet.forks import fork_server
from quipu.actors.fleet.forks.fork_program import ANSWER, FORK, REQUEST
from quipu.actors.fleet.forks.fork_server import Fork, ForkLink, ForkServer
from tests.grammars import EOS
from tests.processes import eventually, has_ended
from tests.tiny import TINY

FRAMES = (TINY / "tokenizer.json").read_bytes(), json.dumps([EOS]).encode()


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    forks = ForkServer.start(MODULE, *FRAMES)
    yield forks
    forks.end()
    assert has_ended(forks.pid)


def fork_one(forks: ForkServer) -> Fork:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 1 << 16)
    try:
        return forks.fork(descriptor)
    finally:
        os.close(descriptor)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_how_a_child_has_ended(forks: ForkServer) -> None:
    """A child's exit status is returned once, even if the fork server has reaped it; a running child is killed."""
    for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGKILL):
        fork = fork_one(forks)
        os.kill(fork.pid, number)
        with fork.link:
            assert fork.link.recv(1) == b""
        assert forks.end_child(fork) == -number and forks.end_child(fork) is None
    stopped = fork_one(forks)
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.link.close()
    assert forks.end_child(stopped) == -signal.SIGKILL and has_ended(stopped.pid)


def test_child_whose_socket_is_closed(forks: ForkServer) -> None:
    """A child whose socket is closed ends by itself, and does not stay a zombie."""
    fork = fork_one(forks)
    ForkLink(fork, 1.0).close()
    eventually(lambda: not Path(f"/proc/{fork.pid}").exists(), "it has ended")
    assert forks.end_child(fork) is None


def test_nothing_is_left(forks: ForkServer) -> None:
    """When the fork server is ended, its children end, including stopped ones."""
    left = [fork_one(forks) for _ in range(3)]
    os.kill(left[0].pid, signal.SIGSTOP)
    forks.end()
    for fork in left:
        fork.link.close()
        eventually(lambda fork=fork: has_ended(fork.pid), "the child has ended")
    with pytest.raises(OSError):
        forks.fork()
    assert not forks.is_usable


def test_parent_that_dies() -> None:
    """The fork server ends with its parent, and so do its children."""
    forks = ForkServer.start(MODULE, *FRAMES)
    fork = fork_one(forks)
    forks._link.close()  # noqa: SLF001 - what the kernel does when a process ends
    eventually(lambda: forks._process.poll() is not None, "it has ended")  # noqa: SLF001
    fork.link.close()
    eventually(lambda: has_ended(fork.pid), "its child has ended")
    forks.end()


def test_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that cannot be started, ends, or does not answer is an OSError."""
    with pytest.raises(OSError, match="has ended"):
        ForkServer.start(MODULE, b"no tokenizer", b"not JSON")
    monkeypatch.setattr(fork_server, "START_S", 0.05)
    with pytest.raises(TimeoutError):
        ForkServer.start(MODULE)
    monkeypatch.setattr(sys, "executable", "/nothing/here")
    with pytest.raises(FileNotFoundError):
        ForkServer.start(MODULE)


def test_no_process_can_be_forked(forks: ForkServer) -> None:
    """A fork server without free descriptors raises OSError, leaks none here, and can fork again later."""
    fork_one(forks).link.close()
    few, hard = resource.prlimit(forks.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(forks.pid, resource.RLIMIT_NOFILE, (4, hard))
    before = open_descriptors()
    with pytest.raises(OSError, match="no process can be forked"):
        fork_one(forks)
    assert not open_descriptors() - before
    resource.prlimit(forks.pid, resource.RLIMIT_NOFILE, (few, hard))
    fork_one(forks).link.close()


def test_many_threads_ask(forks: ForkServer) -> None:
    """Each thread gets the answer to its own request."""
    pids: list[int] = []

    def ask() -> None:
        for _ in range(5):
            fork = fork_one(forks)
            pids.append(fork.pid)
            fork.link.close()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == 20
    eventually(lambda: all(has_ended(pid) for pid in pids), "all have ended")


def test_request_for_a_process_of_somebody_else(forks: ForkServer) -> None:
    """A process that is not a child of the fork server is not killed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert forks.end_child(Fork(os.getpid(), ours)) is None


PROGRAM = """
import os, socket, sys, time
from quipu.actors.fleet.forks.fork_program import serve_forks

link = socket.socket(fileno=os.dup(0))
serve_forks(link, lambda descriptors: time.sleep(0.3))
time.sleep(0.6)
"""


def test_parent_that_is_gone_amid_a_request() -> None:
    """The fork server ends, and does not wait for the rest with all of a processor."""
    ours, theirs = socket.socketpair()
    with theirs:
        program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs)
    with ours:
        ours.sendall(REQUEST.pack(FORK, 0)[:3])
    try:
        assert program.wait(timeout=30) == 0
    finally:
        program.kill()


def test_child_that_ends_after_its_parent_is_gone() -> None:
    """After the fork server has stopped serving, a child's end does not make it write to stderr."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stderr=subprocess.PIPE)
        ours.sendall(REQUEST.pack(FORK, 0))
        assert ANSWER.unpack(ours.recv(ANSWER.size))[0] > 0
        ours.shutdown(socket.SHUT_WR)
        assert program.communicate(timeout=30)[1] == b""
    assert program.returncode == 0
