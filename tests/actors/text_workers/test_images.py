"""Decoding of images: pixels beside transformers' own, limits, and what becomes of processes."""

from __future__ import annotations

import base64
import random
from io import BytesIO
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from PIL import Image
from transformers import Gemma3ImageProcessorPil, LlavaImageProcessorPil
from transformers.image_utils import load_image

from quipu.actors.messages.images import EncodedImage, ImageFormat
from quipu.actors.text_workers import image_pool
from quipu.actors.text_workers.child_start import start_child
from quipu.actors.text_workers.image_pool import ImagePool
from quipu.actors.text_workers.image_worker import LENGTH, ORIENTATION, PIXELS, decode
from quipu.actors.tokenizer.encoding_errors import ImageRefused

FORMAT = ImageFormat(placeholder=9, num_tokens=4, shorter_side=24, height=20, width=20, resample=3)
SETTINGS = {**attrs.asdict(FORMAT), "max_pixels": 1 << 20, "limit_s": 5.0}


def draw(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.frombytes(mode, (width, height), random.Random(width).randbytes(width * height * len(mode)))


def encoded(image: Image.Image, kind: str, **options: Any) -> EncodedImage:
    file = BytesIO()
    image.save(file, kind, **options)
    return EncodedImage(base64.b64encode(file.getvalue()).decode(), "messages[0]")


@pytest.mark.parametrize("size", [(20, 20), (24, 24), (24, 31), (90, 47), (7, 100), (300, 299)])
@pytest.mark.parametrize(("kind", "mode"), [("png", "RGB"), ("jpeg", "RGB"), ("webp", "RGB"), ("png", "RGBA")])
def test_pixels(size: tuple[int, int], kind: str, mode: str) -> None:
    """Pixels are those that transformers' processor makes before it normalizes them."""
    image = encoded(draw(*size, mode), kind)
    processor = LlavaImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 20, "width": 20}, do_rescale=False, do_normalize=False
    )
    opened = Image.open(BytesIO(base64.b64decode(image.data))).convert("RGB")
    theirs = processor(opened, return_tensors="np")["pixel_values"][0]
    assert decode(image.data.encode(), SETTINGS) == theirs.transpose(1, 2, 0).astype("uint8").tobytes()


@pytest.mark.parametrize("size", [(20, 20), (24, 24), (90, 47), (7, 100)])
def test_pixels_without_proportions(size: tuple[int, int]) -> None:
    """Both sides of an image are scaled to the model's size, whatever its own is, as by transformers' processor."""
    image = encoded(draw(*size), "png")
    processor = Gemma3ImageProcessorPil(size={"height": 20, "width": 20}, do_rescale=False, do_normalize=False)
    opened = Image.open(BytesIO(base64.b64decode(image.data)))
    theirs = processor(opened, return_tensors="np")["pixel_values"][0]
    ours = decode(image.data.encode(), {**SETTINGS, "shorter_side": None, "resample": 2})
    assert ours == theirs.transpose(1, 2, 0).astype("uint8").tobytes()


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_held_camera(orientation: int, kind: str) -> None:
    """A photo is read as it is seen, however the camera was held, as transformers reads it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = encoded(draw(40, 27), kind, exif=exif)
    seen = load_image(image.data)
    assert (seen.size == (27, 40)) == (orientation in range(5, 9))
    settings = {**SETTINGS, "shorter_side": 24}
    assert decode(image.data.encode(), settings) == decode(encoded(seen, "png").data.encode(), settings)


def test_damaged_orientation() -> None:
    """Damaged entries beside the pixels do not keep an image from being read."""
    plain, damaged = encoded(draw(20, 20), "png"), encoded(draw(20, 20), "png", exif=b"Exif\0\0MM??\xff\xff\xff\xff")
    assert decode(damaged.data.encode(), SETTINGS) == decode(plain.data.encode(), SETTINGS)


async def test_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal pixels have equal digests, whatever their files. An image that takes too long ends with its process, and
    the next one is decoded."""
    image = draw(30, 30)
    async with trio.open_nursery() as nursery:
        pool = ImagePool(FORMAT)
        await nursery.start(pool.run)
        one, other, third = await pool.read(
            [encoded(image, "png"), encoded(image, "webp", lossless=True), encoded(draw(31, 30), "png")], "tenant"
        )
        assert one.digest == other.digest != third.digest and one.pixels == other.pixels
        assert (one.num_tokens, len(one.pixels)) == (4, 20 * 20 * 3)
        with pytest.raises(ImageRefused) as refused:
            await pool.read([EncodedImage("AAAA", "messages[0].content[1]")], "tenant")
        assert refused.value.error.param == "messages[0].content[1]"
        nursery.cancel_scope.cancel()
    monkeypatch.setattr(image_pool, "LIMIT_S", 0.002)
    async with trio.open_nursery() as nursery:
        pool = ImagePool(FORMAT)
        await nursery.start(pool.run)
        with pytest.raises(ImageRefused, match="takes too long"):
            await pool.read([encoded(Image.effect_noise((3000, 3000), 50), "png")], "tenant")
        nursery.cancel_scope.cancel()


async def test_idle_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed while it had nothing to do refuses no image: another one decodes it."""
    started: list[trio.Process] = []

    async def start(module: str) -> tuple[trio.Process, trio.SocketStream]:
        process, stream = await start_child(module)
        started.append(process)
        return process, stream

    monkeypatch.setattr(image_pool, "start_child", start)
    async with trio.open_nursery() as nursery:
        pool = ImagePool(FORMAT)
        await nursery.start(pool.run)
        image = encoded(draw(30, 30), "png")
        (first,) = await pool.read([image], "tenant")
        started[0].kill()
        await started[0].wait()
        (second,) = await pool.read([image], "tenant")
        assert second.digest == first.digest and len(started) == 2
        nursery.cancel_scope.cancel()


class Ended:
    """A process that has ended."""

    async def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("answer", [LENGTH.pack(1 << 31), LENGTH.pack(3) + PIXELS + b"ab"])
async def test_answer_that_is_none(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """A damaged decoder is believed neither the length of its answer nor the number of its pixels."""

    async def start(_: str) -> tuple[Ended, trio.abc.Stream]:
        ours, theirs = trio.testing.memory_stream_pair()
        await theirs.send_all(answer)
        return Ended(), ours

    monkeypatch.setattr(image_pool, "start_child", start)
    async with trio.open_nursery() as nursery:
        pool = ImagePool(FORMAT)
        await nursery.start(pool.run)
        with pytest.raises(ImageRefused, match="ends its decoder"):
            await pool.read([EncodedImage("AAAA", "messages[0]")], "tenant")
        nursery.cancel_scope.cancel()


async def test_one_tenant_takes_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a tenant's images are decoded, another's are not behind them."""
    order = []
    may_end = trio.Event()

    async def hold(_: ImagePool, image: EncodedImage) -> bytes:
        order.append(image.param)
        await may_end.wait()
        return b""

    monkeypatch.setattr(ImagePool, "_decode", hold)
    async with trio.open_nursery() as nursery:
        pool = ImagePool(FORMAT)
        await nursery.start(pool.run)
        for index in range(3):
            nursery.start_soon(pool.read, [EncodedImage("AAAA", f"greedy {index}")], "greedy")
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pool.read, [EncodedImage("AAAA", "other")], "other")
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["greedy 0", "other"]
        may_end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(order) == 4
        nursery.cancel_scope.cancel()


async def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot decode images says so, by the field of the image."""
    monkeypatch.setattr(image_pool, "find_spec", lambda name: None)
    with pytest.raises(ImageRefused, match=r"`messages\[0\]`: this server cannot decode images: Pillow"):
        await ImagePool(FORMAT).read([encoded(draw(9, 9), "png")], "tenant")
