"""Where a chunk of a prompt with images ends that no step may divide."""

from __future__ import annotations

import pytest

from quipu.actors.messages.images import PromptImage
from quipu.actors.shared.whole_images import whole_chunk

IMAGES = [PromptImage(b"", b"", 1, 1, 5, start) for start in (3, 10, 15)]


@pytest.mark.parametrize(
    ("start", "count", "whole", "completed"),
    [
        (0, 3, 3, 3),
        (0, 4, 3, 3),
        (0, 8, 8, 8),
        (0, 12, 10, 10),
        (0, 17, 15, 15),
        (0, 100, 100, 100),
        (3, 4, 0, 5),
        (3, 5, 5, 5),
        (5, 2, 0, 3),
        (5, 3, 3, 3),
        (7, 4, 3, 3),
        (8, 4, 2, 2),
        (10, 1, 0, 5),
        (14, 1, 1, 1),
        (14, 3, 1, 1),
        (18, 1, 0, 2),
        (25, 7, 7, 7),
    ],
)
def test_chunk(start: int, count: int, whole: int, completed: int) -> None:
    """A chunk that would end within an image ends before it, or is empty; if it must not be, it is all that is left of
    the image."""
    assert whole_chunk(start, count, IMAGES) == whole
    assert whole_chunk(start, count, IMAGES, completes=True) == completed
    assert whole_chunk(start, count, ()) == count
