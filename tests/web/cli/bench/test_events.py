"""Server-sent events are parsed correctly, wherever the bytes are split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quipu.web.cli.bench.answer import EventReader

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": a comment\r\n\r\n"
    b'event: delta\ndata:{"text": "h\xc3\xa9 \xf0\x9f\xaa\xa2"}\r\n\r\n'
    b"data: two\r\ndata:  lines\r\n\r\n"
    b"id: 7\nretry: 10\n\n"
    b"data: bare\r\r"
    b"data\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b"one", '{"text": "hé 🪢"}'.encode(), b"two\n lines", b"bare", b"", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [data for piece in pieces for data in reader.feed(piece)]


def test_all_at_once() -> None:
    """Comments, other fields, all three line endings and a byte order mark are handled; only data is returned."""
    assert read([STREAM]) == EVENTS


def test_byte_by_byte() -> None:
    """Characters of several bytes and CRLF may arrive in parts."""
    assert read([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split(cuts: list[int]) -> None:
    """The result does not depend on where the bytes are split."""
    borders = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[a:b] for a, b in pairwise(borders)]) == EVENTS


def test_incomplete_event() -> None:
    """An incomplete event is not returned, and the reader reports that something is missing."""
    reader = EventReader()
    assert list(reader.feed(b"data: one\n\ndata: tw")) == [b"one"]
    assert not reader.is_between
    assert list(reader.feed(b"o\n")) == []
    assert not reader.is_between
    assert list(reader.feed(b"\n")) == [b"two"]
    assert reader.is_between
