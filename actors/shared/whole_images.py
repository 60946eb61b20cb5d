"""Where a chunk of a prompt may end, if the tokens of its images attend to one another in both directions.

A token of such an image is computed with keys and values of all of its tokens, so a pass computes all that is left of
it. It may begin within an image: the key of a block holds the digest of each image of which the block has a part
(`block_keys.py`), and no chunk ends within an image, so a cached block was computed with the whole of it.

Used by the scheduler for sequences that run, and by the KV-block manager for those that it admits.

What must always hold: a sequence that has a step to itself advances in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.images import PromptImage


def whole_chunk(start: int, count: int, images: Sequence[PromptImage], *, completes: bool = False) -> int:
    """Return how many of `count` positions from `start` on to compute, so that the chunk ends within no image.

    It is 0 if the image at `start` has more positions left; `completes`: then it is all of these.
    """
    end = start + count
    for image in images:
        if image.start < end < image.end:
            return max(0, image.start - start) or (image.end - start if completes else 0)
    return count
