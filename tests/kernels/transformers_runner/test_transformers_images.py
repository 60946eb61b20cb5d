"""Logits behind images, however they are computed, beside transformers' for the whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from transformers import AutoModelForImageTextToText

from quipu.kernels.backend import KVMemory
from quipu.kernels.batch import ImageTokens, StepBatch
from quipu.kernels.machine import Memory
from quipu.kernels.step_types import PromptImage
from quipu.kernels.transformers_runner import transformers_backend
from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend
from tests.kernels.kernel_checkpoints import make_batch, prompt, scattered_blocks
from tests.kernels.transformers_runner.foreign_families import make_transformers_backend
from tests.kernels.transformers_runner.seeing_models import (
    NUM_TOKENS,
    PLACEHOLDER,
    draw_image,
    make_seeing_model,
    pixel_values,
)

MIB = 1 << 20
TOLERANCE = 2e-5
"""Of the logits' standard deviation."""
BEFORE, BETWEEN, AFTER = prompt(10, seed=1), prompt(3, seed=2), prompt(15, seed=3)
SEEN = [PLACEHOLDER] * NUM_TOKENS
TOKENS = [*BEFORE, *SEEN, *BETWEEN, *SEEN, *AFTER]
IMAGES = [draw_image(1, 10), draw_image(2, 13 + NUM_TOKENS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def backend(folder: Path) -> TransformersBackend:
    return make_transformers_backend(folder)


@torch.inference_mode()
def logits_of_their_own(folder: Path, tokens: list[int], images: Sequence[PromptImage]) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    pixels = torch.cat([pixel_values(image) for image in images]) if images else None
    logits: torch.Tensor = model(torch.tensor([tokens]), pixel_values=pixels).logits[0]
    return logits


def chunk(start: int, end: int, blocks: list[int], images: Sequence[PromptImage]) -> StepBatch:
    """Make a batch of a part of the prompt."""
    parts = []
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            parts.append(ImageTokens(image, first - image.start, 0, first - start, last - first))
    batch = make_batch({"token_ids": TOKENS[start:end], "position": start, "blocks": blocks})
    return attrs.evolve(batch, images=parts)


@pytest.mark.parametrize("largest", [1000, 10])
def test_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Room is kept for the larger of a pass and of an image's computation, and for the features that are held."""
    peaks = iter([largest, 400])

    def peak_of(run: Callable[[], object]) -> int:
        run()
        return next(peaks)

    monkeypatch.setattr(transformers_backend, "peak_of", peak_of)
    monkeypatch.setattr(transformers_backend, "memory", lambda: Memory(total=4 * MIB, available=4 * MIB))
    monkeypatch.setattr(transformers_backend, "resident", lambda: 0)
    kept = make_transformers_backend(folder, num_blocks=None, kv_memory=KVMemory(utilization=0.5))
    held = 17 * NUM_TOKENS * 64 * 4
    assert kept.memory_plan.workspace_bytes == held + (4000 if largest == 1000 else 400)


def test_logits_behind_images(folder: Path, backend: TransformersBackend) -> None:
    """Cold, in chunks that end within an image, and behind cached images: transformers' logits. Other images differ."""
    whole, length = logits_of_their_own(folder, TOKENS, IMAGES), len(TOKENS)
    spread = float(whole.std())

    def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours - theirs).abs().max()) / spread

    cold = backend.logits(chunk(0, length, scattered_blocks(8, seed=1), IMAGES), [*range(length)])
    assert difference(cold, whole) < TOLERANCE
    table = scattered_blocks(16, seed=2)[:8]
    for start in range(0, length, 17):
        end = min(start + 17, length)
        logits = backend.logits(chunk(start, end, table, IMAGES), [*range(end - start)])
        assert difference(logits, whole[start:end]) < TOLERANCE
    warm = [*table[:6], *scattered_blocks(24, seed=2)[16:18]]
    rest = backend.logits(chunk(96, length, warm, IMAGES), [*range(length - 96)])
    assert difference(rest, whole[96:]) < TOLERANCE
    others = [IMAGES[0], draw_image(3, IMAGES[1].start)]
    expected = logits_of_their_own(folder, TOKENS, others)
    logits = backend.logits(chunk(0, length, table, others), [*range(length)])
    assert difference(logits, expected) < TOLERANCE
    assert difference(logits[: others[1].start], whole[: others[1].start]) < TOLERANCE
    assert difference(logits[others[1].start :], whole[others[1].start :]) > 0.1


def test_text_alone(folder: Path, backend: TransformersBackend) -> None:
    """A prompt without images has the logits that transformers computes."""
    tokens = prompt(40, seed=5)
    batch = make_batch({"token_ids": tokens, "position": 0, "blocks": scattered_blocks(4, seed=1)})
    theirs = logits_of_their_own(folder, tokens, [])
    assert float((backend.logits(batch, [*range(40)]) - theirs).abs().max()) / float(theirs.std()) < TOLERANCE


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
