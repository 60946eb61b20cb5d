"""Logits behind images, however they are computed, beside transformers' for the whole prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaImageProcessorPil

from quipu.actors.shared.whole_images import whole_chunk
from quipu.kernels.backend import KVMemory
from quipu.kernels.batch import ImageTokens, StepBatch
from quipu.kernels.machine import Memory
from quipu.kernels.step_types import PromptImage
from quipu.kernels.transformers_runner import transformers_backend
from quipu.kernels.transformers_runner.image_tower import Normalization
from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.kernels.transformers_runner.foreign_families import make_transformers_backend
from tests.kernels.transformers_runner.seeing_models import (
    NUM_TOKENS,
    PLACEHOLDER,
    draw_image,
    make_seeing_model,
    pixel_values,
    told_of_images,
)

MIB = 1 << 20
TOLERANCE = 2e-5
"""Of the logits' standard deviation."""
BEFORE, BETWEEN, AFTER = prompt(10, seed=1), prompt(3, seed=2), prompt(15, seed=3)
SEEN = [PLACEHOLDER] * NUM_TOKENS
TOKENS = [*BEFORE, *SEEN, *BETWEEN, *SEEN, *AFTER]
IMAGES = [draw_image(1, 10), draw_image(2, 13 + NUM_TOKENS)]


@attrs.frozen
class Seeing:
    """A checkpoint that reads images, and how its backend divides a prompt."""

    folder: Path
    family: str
    block_size: int = 16

    @property
    def may_divide(self) -> bool:
        """Whether a chunk may end within an image."""
        return self.family == "llava"


CASES = [("llava", 64, 16), ("gemma3", 64, 16), ("gemma3", 20, 16), ("gemma3", 64, 4), ("gemma3", 20, 128)]
"""Families, their windows, which are larger or smaller than an image, and block sizes."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    family, window, block_size = request.param
    folder = make_seeing_model(tmp_path_factory.mktemp("seeing"), family=family, window=window)
    return Seeing(folder, family, block_size)


@pytest.fixture(scope="module")
def backend(seeing: Seeing) -> TransformersBackend:
    return make_transformers_backend(seeing.folder, block_size=seeing.block_size)


@torch.inference_mode()
def logits_of_their_own(seeing: Seeing, tokens: list[int], images: Sequence[PromptImage]) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(seeing.folder, dtype=torch.float32, attn_implementation="eager")
    pixels = torch.cat([pixel_values(image) for image in images]) if images else None
    told = told_of_images(seeing.family, tokens) if images else {}
    logits: torch.Tensor = model(torch.tensor([tokens]), pixel_values=pixels, **told).logits[0]
    return logits


def test_normalization(tmp_path: Path) -> None:
    """How pixels become numbers is read where transformers reads it, also if both of its files say so."""
    own = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 1.0, 1.0]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    assert Normalization.read(tmp_path).mean == own["image_mean"]
    whole = {"image_processor": {**own, "image_mean": [0.4, 0.5, 0.6]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    theirs = LlavaImageProcessorPil.from_pretrained(tmp_path)
    assert Normalization.read(tmp_path).mean == list(theirs.image_mean) == [0.4, 0.5, 0.6]
    (tmp_path / "processor_config.json").write_text("{}")
    assert Normalization.read(tmp_path).mean == own["image_mean"]


def chunk(
    start: int, end: int, blocks: list[int], images: Sequence[PromptImage], tokens: Sequence[int] = TOKENS
) -> StepBatch:
    """Make a batch of a part of a prompt."""
    parts = []
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            parts.append(ImageTokens(image, first - image.start, 0, first - start, last - first))
    batch = make_batch({"token_ids": list(tokens[start:end]), "position": start, "blocks": blocks})
    return attrs.evolve(batch, images=parts)


@pytest.mark.parametrize("largest", [1000, 10])
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Room is kept for the larger of a pass and of an image's computation, and for the features that are held."""
    peaks = iter([largest, 400])

    def peak_of(run: Callable[[], object]) -> int:
        run()
        return next(peaks)

    monkeypatch.setattr(transformers_backend, "peak_of", peak_of)
    monkeypatch.setattr(transformers_backend, "memory", lambda: Memory(total=4 * MIB, available=4 * MIB))
    monkeypatch.setattr(transformers_backend, "resident", lambda: 0)
    kept = make_transformers_backend(make_seeing_model(tmp_path), num_blocks=None, kv_memory=KVMemory(utilization=0.5))
    held = 17 * NUM_TOKENS * 64 * 4
    assert kept.memory_plan.workspace_bytes == held + (4000 if largest == 1000 else 400)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.std())


def blocks_for(seeing: Seeing, seed: int) -> list[int]:
    return scattered_blocks(-(-len(TOKENS) // seeing.block_size), seed=seed)


def test_logits_behind_images(seeing: Seeing, backend: TransformersBackend) -> None:
    """Cold, in chunks, and behind a cached prefix that ends anywhere in an image or behind it: transformers' logits of
    the whole prompt. Other images differ."""
    whole, length = logits_of_their_own(seeing, TOKENS, IMAGES), len(TOKENS)
    cold = backend.logits(chunk(0, length, blocks_for(seeing, 1), IMAGES), [*range(length)])
    assert difference(cold, whole) < TOLERANCE
    table, start = blocks_for(seeing, 2), 0
    while start < length:
        count = min(17, length - start)
        count = count if seeing.may_divide else whole_chunk(start, count, IMAGES, completes=True)
        logits = backend.logits(chunk(start, start + count, table, IMAGES), [*range(count)])
        assert difference(logits, whole[start : start + count]) < TOLERANCE
        start += count
    for start in (11, 16, 32, 45, 64, 84, 96):
        rest = backend.logits(chunk(start, length, table, IMAGES), [*range(length - start)])
        assert difference(rest, whole[start:]) < TOLERANCE
    others = [IMAGES[0], draw_image(3, IMAGES[1].start)]
    expected = logits_of_their_own(seeing, TOKENS, others)
    logits = backend.logits(chunk(0, length, table, others), [*range(length)])
    assert difference(logits, expected) < TOLERANCE
    assert difference(logits[: others[1].start], whole[: others[1].start]) < TOLERANCE
    assert difference(logits[others[1].start :], whole[others[1].start :]) > 0.1


@pytest.mark.parametrize("tokens", [[*SEEN, *AFTER], [*BEFORE, *SEEN]], ids=["first", "last"])
def test_edges(seeing: Seeing, backend: TransformersBackend, tokens: list[int]) -> None:
    """An image may be the first or the last of a prompt, beside rows of other prompts."""
    image = draw_image(4, tokens.index(PLACEHOLDER))
    whole = logits_of_their_own(seeing, tokens, [image])
    one, other, *blocks = scattered_blocks(2 + len(TOKENS) // seeing.block_size + 1, seed=3)
    beside = make_batch(
        {"token_ids": BETWEEN, "position": 0, "blocks": [one]},
        {"token_ids": tokens, "position": 0, "blocks": blocks},
        {"token_ids": BETWEEN[:1], "position": 0, "blocks": [other]},
    )
    batch = attrs.evolve(beside, images=[ImageTokens(image, 0, 1, image.start, NUM_TOKENS)])
    first = len(BETWEEN)
    assert difference(backend.logits(batch, [*range(first, first + len(tokens))]), whole) < TOLERANCE


def test_passes_within_an_image(seeing: Seeing, backend: TransformersBackend) -> None:
    """A pass that ends within an image is refused where the image's tokens attend to one another."""
    batch = chunk(0, 30, blocks_for(seeing, 6), IMAGES)
    if seeing.may_divide:
        backend.logits(batch, [29])
    else:
        with pytest.raises(ValueError, match="ends at 30, within an image that ends at 46"):
            backend.logits(batch, [29])


def test_text_alone(seeing: Seeing, backend: TransformersBackend) -> None:
    """A prompt without images has the logits that transformers computes."""
    tokens = prompt(40, seed=5)
    batch = make_batch({"token_ids": tokens, "position": 0, "blocks": blocks_for(seeing, 1)})
    theirs = logits_of_their_own(seeing, tokens, [])
    assert difference(backend.logits(batch, [*range(40)]), theirs) < TOLERANCE


def test_features_are_bounded(backend: TransformersBackend) -> None:
    """Features of few images are held, whatever their number; a wrong number of placeholders is refused."""
    tower = backend._tower  # noqa: SLF001 -- nothing else shows what it holds
    assert tower is not None
    with torch.inference_mode():
        for seed in range(40):
            tower.features(draw_image(seed))
        assert len(tower._held) == 16  # noqa: SLF001
        with pytest.raises(ValueError, match="has 35 placeholders"):
            tower.features(attrs.evolve(draw_image(50), num_tokens=35))
