"""Images of prompts, before and after they have been decoded."""

from __future__ import annotations

import attrs

from quipu.kernels.step_types import PromptImage as PromptImage


@attrs.frozen(eq=False)
class EncodedImage:
    """An image as a client has sent it."""

    data: str
    """Base64."""
    param: str
    """The field that has it, for errors."""


@attrs.frozen
class ImageFormat:
    """How a model wants images: the shorter side is scaled, then the middle is cut out."""

    placeholder: int
    """The token that stands for a part of an image."""
    num_tokens: int
    """How many of them stand for an image."""
    shorter_side: int
    height: int
    width: int
    resample: int
    """Pillow's number of the filter that is used for scaling."""


IMAGE_MARK = "\ufdd2"
"""What stands for an image in the content of a message: a noncharacter, which never occurs in text."""
