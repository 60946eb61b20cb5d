"""Images among the parts of messages: data URLs and base64, as far as they are checked before they are decoded.

An image becomes a mark in the content of its message. What must always hold: nothing is fetched from other servers; an
error names the field of the image.
"""

from __future__ import annotations

import re

from quipu.actors.messages.images import IMAGE_MARK, EncodedImage, ImageFormat

from ..request.errors import bad_value, unsupported_value
from .fields import Fields

MAX_IMAGES = 64
"""Of one request; each also takes its tokens of the context."""
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


class ImageParts:
    """The images of one request, in order."""

    def __init__(self, wanted: ImageFormat | None) -> None:
        """`wanted`: None if the model reads no images."""
        self._wanted = wanted
        self._found: list[EncodedImage] = []

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        return tuple(self._found)

    @property
    def are_read(self) -> bool:
        """Whether the model reads images."""
        return self._wanted is not None

    @property
    def num_tokens(self) -> int | None:
        """How many tokens of the prompt stand for images; None: there are none."""
        return None if self._wanted is None or not self._found else self._wanted.num_tokens * len(self._found)

    def read_part(self, part: Fields) -> str:
        """Read an `image_url` part of chat completions, or an `input_image` of responses. Raises APIError.

        Return what stands for it in the message's content.
        """
        self._check_model(part, "parts")
        if part.text("type") == "input_image":
            return self._add_url(part.text("image_url"), part.param("image_url"))
        url = part.required_fields("image_url")
        return self._add_url(url.text("url"), url.param("url"))

    def read_block(self, block: Fields) -> str:
        """Do the same for an `image` block of messages. Raises APIError."""
        self._check_model(block, "blocks")
        source = block.required_fields("source")
        if (kind := source.text("type")) != "base64":
            raise unsupported_value(source.param("type"), f"must be `base64`; a source of type `{kind}` is not fetched")
        return self._add(source.text("data"), source.param("data"))

    def _check_model(self, part: Fields, what: str) -> None:
        if self._wanted is None:
            problem = f"{what} of type `{part.text('type')}` are not supported by this model, which reads no images"
            raise unsupported_value(part.param("type"), problem)

    def _add_url(self, url: str, param: str) -> str:
        if (head := _DATA_URL.match(url)) is None:
            raise bad_value(param, "must be a URL with data (data:image/png;base64,...): no images are fetched")
        return self._add(url[head.end() :], param)

    def _add(self, data: str, param: str) -> str:
        if len(self._found) == MAX_IMAGES:
            raise bad_value(param, f"a request must not have more than {MAX_IMAGES} images")
        self._found.append(EncodedImage(data, param))
        return IMAGE_MARK


NO_IMAGES = ImageParts(None)
"""For a model that reads none. Never changed."""
