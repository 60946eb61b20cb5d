"""Rows of chats with images: as many as a request may have, or of files that decode to far more than they are."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from bench.stalls.row_parts import CHAT, MESSAGES, Row, chat, one, said

MOST = 64
LARGE = 5_600
"""Pixels of a side: little less than an image may have in all, and 100 KB as a file."""


def flat_png(side: int) -> str:
    """Return a square PNG of one color, as base64."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compressobj(1)
    data = b"".join(rows.compress(bytes(1 + 3 * side)) for _ in range(side)) + rows.flush()
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in chunks
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()


def _shown(num_images: int, data: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return chat([said([part] * num_images)])


def _block(data: str) -> dict[str, Any]:
    return chat([said([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}])])


IMAGE_ROWS = (
    Row("64 small images", one(CHAT, lambda: _shown(MOST, flat_png(16)), 4), concurrency=4, server="seeing"),
    Row("image of 31 megapixels", one(CHAT, lambda: _shown(1, flat_png(LARGE)), 8), concurrency=8, server="seeing"),
    Row("image of 6 MB, no image", one(MESSAGES, lambda: _block("A" * 6_000_000), 4), concurrency=4, server="seeing"),
)
