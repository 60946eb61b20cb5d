"""Ranks as processes: none outlives the one that started it, none dies unnoticed, none inherits what is not its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.kernels.step_errors import RankLost, is_context_lost
from quipu.kernels.vllm_runner.followers import Follower, Followers
from tests.kernels.kernel_checkpoints import backend_config
from tests.processes import eventually, has_ended
from tests.tiny import TINY
from tests.vllm_runner.rank_stand_in import Describe, Description, End

MODULE = "tests.vllm_runner.rank_stand_in"
ROOT = Path(__file__).parents[2]


class Ended:
    """Stands for the end of this process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_over = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.is_over.set()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Ended()


@pytest.fixture
def followers(ended: Ended) -> Iterator[Followers]:
    """Start two, beside rank 0."""
    started = Followers(backend_config(TINY, tensor_parallel_size=3), ended, MODULE)
    yield started
    started.close()


def describe(followers: Followers) -> list[Description]:
    followers.tell(Describe())
    return followers.receive_each(Description)


def pids_of(followers: Followers) -> list[int]:
    return [follower.process.pid for follower in vars(followers)["_all"]]


def test_places(followers: Followers) -> None:
    """Each knows its rank, and how many there are."""
    assert [(one.place.rank, one.place.size) for one in describe(followers)] == [(1, 3), (2, 3)]
    assert len(followers) == 2 and followers.leader.rank == 0


def test_descriptors(ended: Ended) -> None:
    """They get their two connections and their memory, and nothing else, even of what children may inherit."""
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    started = Followers(backend_config(TINY, tensor_parallel_size=3), ended, MODULE)
    try:
        link = str(Path(f"/proc/self/fd/{theirs.fileno()}").readlink())
        for one in describe(started):
            sockets = [name for name in one.descriptors if name.startswith("socket:")]
            assert len(sockets) == 2 and link not in sockets
            memory = [name for name in one.descriptors if name.startswith("/memfd:")]
            assert sorted(memory) == [f"/memfd:rank {one.place.rank} (deleted)", "/memfd:ranks (deleted)"]
    finally:
        started.close()
        ours.close()
        theirs.close()


def test_close(followers: Followers, ended: Ended) -> None:
    """Closing ends them, and is no death."""
    describe(followers)
    pids = pids_of(followers)
    followers.close()
    assert all(map(has_ended, pids)) and not followers
    assert not ended.is_over.is_set()


def test_death_ends_this_process(followers: Followers, ended: Ended, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever this process is waiting for, it ends, and the log says which rank has died and of what."""
    describe(followers)
    followers.are_loaded()
    with caplog.at_level(logging.ERROR):
        os.kill(pids_of(followers)[1], signal.SIGKILL)
        assert ended.is_over.wait(2)
    assert ended.code == 1
    assert "rank 2 of 3 has ended: killed by signal 9" in caplog.text


def test_death_while_loading(followers: Followers, ended: Ended, caplog: pytest.LogCaptureFixture) -> None:
    """One that is killed before it is loaded, of which nobody will say why, ends this process, too."""
    with caplog.at_level(logging.ERROR):
        os.kill(pids_of(followers)[0], signal.SIGKILL)
        assert ended.is_over.wait(2)
    assert ended.code == 1 and "rank 1 of 3 has ended: killed by signal 9" in caplog.text


def test_refusal_in_a_rank_alone(followers: Followers, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot load, while this process waits for it in a collective: after a while this process ends."""
    monkeypatch.setattr("quipu.kernels.vllm_runner.followers.GRACE_S", 0.1)
    followers.tell(End(os.EX_TEMPFAIL, "MemoryError: 3 GiB"))
    assert ended.is_over.wait(5)
    assert ended.code == os.EX_TEMPFAIL


def test_message_to_a_dead_rank(followers: Followers) -> None:
    """No later pass is tried."""
    pid = pids_of(followers)[0]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(pid), "the rank ends")
    with pytest.raises(RankLost, match="rank 1 cannot be told") as raised:
        followers.tell(Describe())
    assert is_context_lost(raised.value)


def test_reason_while_loading(followers: Followers, ended: Ended) -> None:
    """A rank that cannot load says why, and this process has time to say so itself."""
    followers.tell(End(1, "ValueError: no such tensor"))
    with pytest.raises(RankLost, match="rank 1 has ended: exit code 1: ValueError: no such tensor"):
        followers.receive_each(Description)
    followers.close()
    assert not ended.is_over.is_set()


def test_closing_while_a_reason_is_read(followers: Followers, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for whoever reads why a rank has ended, and nothing fails."""
    is_reading, may_read, words = threading.Event(), threading.Event(), Follower.words

    def read(follower: Follower) -> str:
        is_reading.set()
        may_read.wait(5)
        return words(follower)

    monkeypatch.setattr(Follower, "words", read)
    followers.tell(End(1, "ValueError: no such tensor"))
    assert is_reading.wait(5)
    closing = threading.Thread(target=followers.close)
    closing.start()
    closing.join(0.2)
    may_read.set()
    closing.join(5)
    assert not closing.is_alive() and not ended.is_over.is_set()


def test_memory_is_short_while_loading(followers: Followers) -> None:
    """A rank without memory is a reason to try again later."""
    followers.tell(End(os.EX_TEMPFAIL, "MemoryError: 3 GiB"))
    with pytest.raises(MemoryError, match=r"rank 1 has ended: .*3 GiB"):
        followers.receive_each(Description)


def test_failure_in_a_collective(followers: Followers) -> None:
    """An error of this rank while the others may wait for it is the end of all."""
    with pytest.raises(RankLost, match="rank 0 of 3 failed in a pass: MemoryError: all of it"):
        with followers.entering(Describe()):
            raise MemoryError("all of it")


def test_one_rank(ended: Ended) -> None:
    """Without others there is nothing to start, and an error stays what it is."""
    alone = Followers(backend_config(TINY), ended)
    with pytest.raises(MemoryError), alone.entering(Describe()):
        raise MemoryError
    alone.tell(Describe())
    assert not alone and alone.receive_each(Description) == []
    alone.close()


def test_parent_is_killed(tmp_path: Path) -> None:
    """No rank outlives the process that started it, even if that is killed at once."""
    program = (
        "import signal\n"
        "from tests.vllm_runner.test_followers import *\n"
        "followers = Followers(backend_config(TINY, tensor_parallel_size=3), module=MODULE)\n"
        "describe(followers)\n"
        "print(*pids_of(followers), flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.communicate()
    assert len(pids) == 2
    eventually(lambda: all(map(has_ended, pids)), "the ranks end", 2)
