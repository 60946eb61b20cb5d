"""The program of a process that decodes images: it receives one image after the other.

`image_pool.py` starts it, talks to it over its standard input, a socket, and kills it. A small file may decode to
gigabytes or take minutes, and decoders are C code: so they run only here.

    job     length (4 bytes); JSON: `ImageFormat` without its tokens, `max_pixels`, `limit_s`; the image, as base64
    answer  length (4 bytes); a byte, 1 for pixels; pixels as red, green and blue, or why the image is refused, as UTF-8

What must always hold: a process ends when its parent does, and when an image takes too much processor time; it never
uses more memory than `MEMORY_BYTES`; an image is not decoded before its size is known.
"""

from __future__ import annotations

import base64
import binascii
import json
import signal
import struct
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ..fleet.processes.child import become_child

if TYPE_CHECKING:
    from PIL.Image import Image

MEMORY_BYTES = 1 << 30
"""Address space of one process: several times the largest image."""
LENGTH = struct.Struct("<I")
PIXELS = b"\1"
"""The first byte of an answer that is no refusal."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 20
"""Of the longer side to the shorter one: scaling makes the shorter one as long as the model wants it."""


ORIENTATION = 0x0112
"""EXIF's number of the entry."""


class _Refused(ValueError):
    """An image that is not decoded. The message says why."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    link, read = become_child(MEMORY_BYTES)
    try:
        while True:
            settings = json.loads(read(LENGTH.unpack(read(LENGTH.size))[0]))
            data = read(LENGTH.unpack(read(LENGTH.size))[0])
            signal.setitimer(signal.ITIMER_PROF, settings["limit_s"])
            answer = _answer(settings, data)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            link.sendall(LENGTH.pack(len(answer)) + answer)
            del data, answer
    except (EOFError, OSError):
        pass  # the parent is gone


def _answer(settings: dict[str, Any], data: bytes) -> bytes:
    try:
        return PIXELS + decode(data, settings)
    except _Refused as error:
        return b"\0" + str(error).encode()
    except MemoryError:
        return b"\0" + b"it takes too much memory to decode"


def decode(data: bytes, settings: dict[str, Any]) -> bytes:
    """Return the pixels of an image as the model wants them. Raises _Refused, and MemoryError."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit here is ours
    try:
        file = base64.b64decode(data, validate=True)
    except binascii.Error:
        raise _Refused("not valid base64") from None
    try:
        image = Image.open(BytesIO(file), formats=FORMATS)
        width, height = image.size
        if width * height > settings["max_pixels"]:
            raise _Refused(f"it has {width} x {height} pixels, and no more than {settings['max_pixels']} are allowed")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise _Refused(f"one side is more than {MAX_RATIO} times as long as the other")
        rgb = _upright(image.convert("RGB"), _orientation(image))
    except (_Refused, MemoryError):
        raise
    except Exception as error:  # decoders raise anything for a damaged file
        raise _Refused(f"not a PNG, JPEG, WebP or GIF image that can be decoded ({type(error).__name__})") from None
    width, height = rgb.size
    shorter, target_height, target_width = (settings[name] for name in ("shorter_side", "height", "width"))
    sizes = (target_width, target_height)
    if shorter is not None:
        longer = int(shorter * max(width, height) / min(width, height))
        sizes = (shorter, longer) if width <= height else (longer, shorter)
    if sizes != rgb.size:
        rgb = rgb.resize(sizes, resample=settings["resample"])
    left, top = (sizes[0] - target_width) // 2, (sizes[1] - target_height) // 2
    pixels: bytes = rgb.crop((left, top, left + target_width, top + target_height)).tobytes()
    return pixels


def _orientation(image: Image) -> int:
    """Return how a camera was held (EXIF 2.3, 4.6.4 A, Orientation): 1 is upright."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # what is damaged beside the pixels says nothing about them
        return 1


def _upright(image: Image, orientation: int) -> Image:
    """Return an image as it is to be seen, as transformers' `load_image` does."""
    from PIL.Image import Transpose

    ways = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    way = ways.get(orientation)
    return image if way is None else image.transpose(way)


if __name__ == "__main__":
    main()
