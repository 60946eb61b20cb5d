"""Keys of blocks that hold images."""

from __future__ import annotations

import attrs
import pytest

from quipu.actors.shared.block_keys import chain_image_keys, chain_keys
from quipu.kernels.step_types import PromptImage

ROOT, SIZE, NUM_BLOCKS = bytes(32), 4, 12
TOKENS = [7] * (SIZE * NUM_BLOCKS + 2)
"""Placeholders look like everything else."""


def image(name: str, start: int) -> PromptImage:
    return PromptImage(name.encode(), b"", 0, 0, 9, start)


IMAGES = (image("a", 10), image("b", 22))


def keys(*images: PromptImage) -> list[bytes]:
    return chain_image_keys(ROOT, TOKENS, SIZE, images, 0)


def common(one: list[bytes], other: list[bytes]) -> int:
    """Return how many keys are equal, which are the first ones."""
    equal = [a == b for a, b in zip(one, other, strict=True)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


@pytest.mark.parametrize(
    ("images", "num_equal"),
    [
        (IMAGES, NUM_BLOCKS),
        ((), 2),  # text alone
        ((image("c", 10), IMAGES[1]), 2),
        ((IMAGES[0], image("c", 22)), 5),
        ((image("b", 10), image("a", 22)), 2),
        ((IMAGES[0],), 5),
        ((image("a", 11), IMAGES[1]), 2),  # elsewhere in the same block
    ],
)
def test_images_in_keys(images: tuple[PromptImage, ...], num_equal: int) -> None:
    """Prompts share the keys before the first block that holds another image, or one elsewhere, and none after it."""
    assert common(keys(*IMAGES), keys(*images)) == num_equal


def test_text_has_its_own_keys() -> None:
    """Without images, and before the first, keys are those of text."""
    text = chain_keys(ROOT, TOKENS, SIZE)
    assert keys() == text and keys(*IMAGES)[:2] == text[:2]
    assert len(set(keys(*IMAGES))) == len(keys(*IMAGES)) == NUM_BLOCKS


@pytest.mark.parametrize("num_first", range(NUM_BLOCKS + 1))
def test_in_parts(num_first: int) -> None:
    """A chain that is continued anywhere is the same."""
    first = chain_image_keys(ROOT, TOKENS[: num_first * SIZE], SIZE, IMAGES, 0)
    parent = first[-1] if first else ROOT
    rest = chain_image_keys(parent, TOKENS[num_first * SIZE :], SIZE, IMAGES, num_first * SIZE)
    assert first + rest == keys(*IMAGES)


def test_pixels_are_not_hashed_again() -> None:
    """Only the digest counts, which stands for the pixels."""
    assert keys(*(attrs.evolve(one, pixels=b"other") for one in IMAGES)) == keys(*IMAGES)
