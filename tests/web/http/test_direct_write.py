"""A direct writer by itself: what it writes, what it refuses to write, and what it keeps."""

from __future__ import annotations

import errno

import attrs
import pytest
import trio

from quipu.web.http.direct_write import DirectWriter


@attrs.define(eq=False)
class FakeConnection:
    """A connection whose kernel takes `room` bytes; it is also the transport and the protocol state of a writer."""

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

    def writer(self) -> DirectWriter:
        return DirectWriter(self, self, lambda: -1 if self.closed else 7, self.kernel)


def test_a_chunk_is_one_write() -> None:
    """A chunk is framed as in HTTP/1.1, with its length in hexadecimal digits."""
    connection = FakeConnection()
    assert connection.writer().send_nowait(b"x" * 26)
    assert connection.taken == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert connection.descriptors == [7]


@pytest.mark.parametrize("room", range(1, 12))
async def test_remainder_goes_first(room: int) -> None:
    """After a partial write nothing follows until `flush` has written the remainder."""
    connection = FakeConnection(room=room)
    writer = connection.writer()
    assert not writer.send_nowait(b"0123456")
    assert writer.has_remainder
    connection.room = 1000
    with pytest.raises(trio.WouldBlock):
        writer.send_nowait(b"abc")
    await writer.flush()
    assert not writer.has_remainder
    assert writer.send_nowait(b"abc")
    assert connection.taken == b"7\r\n0123456\r\n3\r\nabc\r\n"


def test_full_buffer() -> None:
    """If the kernel accepts nothing, nothing is kept: the caller keeps the chunk."""
    connection = FakeConnection(room=0)
    writer = connection.writer()
    with pytest.raises(trio.WouldBlock):
        writer.send_nowait(b"abc")
    assert not writer.has_remainder and connection.num_aborts == 0


def test_no_direct_write_within_another_write() -> None:
    """A writer refuses to write while the connection is writing."""
    connection = FakeConnection(is_writing=True)
    with pytest.raises(trio.WouldBlock):
        connection.writer().send_nowait(b"abc")
    assert connection.taken == b""


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ETIMEDOUT, errno.ENOBUFS])
def test_failed_connection(error: int) -> None:
    """A failing connection is reset once, and the chunk dropped."""
    connection = FakeConnection(error=error)
    writer = connection.writer()
    assert writer.send_nowait(b"abc") and writer.send_nowait(b"def")
    assert connection.num_aborts == 1 and connection.taken == b"" and not writer.has_remainder


async def test_closed_connection_sends_nothing() -> None:
    """A closed connection sends neither a chunk nor a remainder."""
    connection = FakeConnection(room=3)
    writer = connection.writer()
    assert not writer.send_nowait(b"abc")
    connection.closed = True
    assert writer.send_nowait(b"def")
    await writer.flush()
    assert connection.taken == b"3\r\n"
