"""What errors say, as text for another process."""

from __future__ import annotations

import msgspec
import pytest

from quipu.actors.shared.error_text import MAX_CHARACTERS, error_text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("tensor é is missing"), "tensor é is missing"),
        (MemoryError(), "MemoryError"),
        (ValueError("half of a character: \ud800"), r"half of a character: \ud800"),
        (ValueError("a" * (1 << 20)), "a" * MAX_CHARACTERS + "..."),
    ],
)
def test_what_is_told(error: Exception, text: str) -> None:
    """It is what the error says, in a length and in characters that can be sent."""
    assert error_text(error) == text
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(error_text(error))) == text
