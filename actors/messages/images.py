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
class ImageTexts:
    """What becomes of what a chat template writes for an image, before the chat is tokenized."""

    written: str
    """What the template writes."""
    replacement: str
    """What takes its place, with one placeholder."""
    reserved: tuple[str, ...]
    """What nobody may write beside an image, since only replacements have it."""


@attrs.frozen
class ImageFormat:
    """How a model wants images."""

    placeholder: int
    """The token that stands for a part of an image."""
    num_tokens: int
    """How many of them stand for an image."""
    shorter_side: int | None
    """What the shorter side is scaled to, before the middle is cut out; None: both sides are scaled, to the size."""
    height: int
    width: int
    resample: int
    """Pillow's number of the filter that is used for scaling."""
    texts: ImageTexts | None = None
    """None: the template writes a placeholder for each image."""
    is_whole: bool = False
    """An image's tokens attend to one another in both directions: no pass may end between them."""


IMAGE_MARK = "\ufdd4"
"""What stands for an image in the content of a message: a noncharacter, which never occurs in text, and none of those
that mark places in a chat while it is rendered (`chat_template.py`, `message_spans.py`)."""
