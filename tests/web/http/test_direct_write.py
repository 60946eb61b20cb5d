"""The direct line by itself: what it writes, what it refuses to write, and what waits."""

from __future__ import annotations

import errno

import attrs
import pytest
import trio

from quipu.web.http.direct_write import ChunkLine


@attrs.define(eq=False)
class FakeConnection:
    """A connection whose kernel takes `room` bytes; it is a line's wire and its gate."""

    room: int = 1 << 20
    error: int | None = None
    closed: bool = False
    is_writing: bool = False
    taken: bytes = b""
    num_aborts: int = 0
    descriptors: list[int] = attrs.field(factory=list)

    def kernel(self, descriptor: int, data: bytes) -> int:
        self.descriptors.append(descriptor)
        if self.error is not None:
            raise OSError(self.error, "no")
        if self.room == 0:
            raise BlockingIOError(errno.EAGAIN, "full")
        accepted = data[: self.room]
        self.room -= len(accepted)
        self.taken += accepted
        return len(accepted)

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.taken += data

    def abort(self) -> None:
        self.num_aborts += 1
        self.closed = True

    def line(self) -> ChunkLine:
        return ChunkLine(self, self, lambda: -1 if self.closed else 7, self.kernel)


def test_a_chunk_is_one_write() -> None:
    """Framed as HTTP/1.1 has it, with its length in hexadecimal digits."""
    connection = FakeConnection()
    assert connection.line().send_nowait(b"x" * 26)
    assert connection.taken == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert connection.descriptors == [7]


@pytest.mark.parametrize("room", range(1, 12))
async def test_the_rest_goes_first(room: int) -> None:
    """However little of a chunk was taken, nothing follows before `flush` has written the rest of it."""
    connection = FakeConnection(room=room)
    line = connection.line()
    assert not line.send_nowait(b"0123456")
    assert line.has_rest
    connection.room = 1000
    with pytest.raises(trio.WouldBlock):
        line.send_nowait(b"abc")
    await line.flush()
    assert not line.has_rest
    assert line.send_nowait(b"abc")
    assert connection.taken == b"7\r\n0123456\r\n3\r\nabc\r\n"


def test_full_buffer() -> None:
    """Where nothing was taken nothing waits: the chunk is still its owner's."""
    connection = FakeConnection(room=0)
    line = connection.line()
    with pytest.raises(trio.WouldBlock):
        line.send_nowait(b"abc")
    assert not line.has_rest and connection.num_aborts == 0


def test_not_between_the_bytes_of_another_write() -> None:
    """While the connection writes, a line does not."""
    connection = FakeConnection(is_writing=True)
    with pytest.raises(trio.WouldBlock):
        connection.line().send_nowait(b"abc")
    assert connection.taken == b""


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ETIMEDOUT, errno.ENOBUFS])
def test_failed_connection(error: int) -> None:
    """It is reset, once, and what was to be sent is dropped."""
    connection = FakeConnection(error=error)
    line = connection.line()
    assert line.send_nowait(b"abc") and line.send_nowait(b"def")
    assert connection.num_aborts == 1 and connection.taken == b"" and not line.has_rest


async def test_nothing_leaves_a_closed_connection() -> None:
    """Neither a chunk nor the rest of one."""
    connection = FakeConnection(room=3)
    line = connection.line()
    assert not line.send_nowait(b"abc")
    connection.closed = True
    assert line.send_nowait(b"def")
    await line.flush()
    assert connection.taken == b"3\r\n"
