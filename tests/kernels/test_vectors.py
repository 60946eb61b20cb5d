"""Final hidden states of headless models, pooled: as transformers has them, whatever the chunks and the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaForSequenceClassification, Qwen3ForSequenceClassification

from quipu.kernels.backend import RunsAtOnce
from quipu.kernels.batch import Pooling
from quipu.kernels.opened_model import read_score_weight
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import EACH, backend_config, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

MAKERS: dict[str, Callable[..., Any]] = {"reference": make_backend, "cpu": make_cpu_backend}
EXECUTORS = ["reference", pytest.param("cpu", marks=needs_kernels)]
TOKENS = prompt(150, seed=5)
JUMPS = {("phimoe", "bfloat16")}
"""Where rounding may choose another expert for a token, so that only the mean over all tokens is compared."""
CHUNKS = ([150], [50, 1, 99], [17] * 8 + [14])


def pooled(backend: RunsAtOnce, lengths: list[int], *, is_mean: bool, others: int = 0) -> np.ndarray[Any, Any]:
    """Return what a prompt yields that is computed in chunks of these lengths, beside rows of other prompts."""
    blocks, total, start = scattered_blocks(10, seed=len(lengths), num_blocks=140), np.zeros(0), 0
    for length in lengths:
        beside = [
            {"slot": 1 + i, "token_ids": prompt(3 + i, seed=i), "position": 0, "blocks": [150 + i], "samples": False}
            for i in range(others)
        ]
        row = {"slot": 0, "token_ids": TOKENS[start : start + length], "position": start, "blocks": blocks}
        batch = make_batch(*beside, {**row, "samples": False})
        first, end = batch.query_start[-2:]
        start += length
        if is_mean or start == len(TOKENS):
            batch = attrs.evolve(batch, pooling=Pooling([others], [first if is_mean else end - 1]))
        drawn = backend.step(batch)
        assert not drawn.rows
        for data in drawn.pooled:
            total = np.frombuffer(data) + (total if total.size else 0.0)
    return total / len(TOKENS) if is_mean else total


def states_of(path: Path, dtype: torch.dtype = torch.float32) -> np.ndarray[Any, Any]:
    model = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        states = model(torch.tensor([TOKENS])).last_hidden_state[0]
    return np.asarray(states.double().numpy())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", EACH)
def test_states_match_transformers(checkpoints: dict[str, Path], name: str, executor: str) -> None:
    """The last token's state, and the mean over all, are those of transformers, in float32; so is bfloat16 nearly."""
    states = states_of(checkpoints[name])
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.06)):
        backend = MAKERS[executor](checkpoints[name], dtype=dtype, headless=True)
        pools = [(True, states.mean(0))] if (name, dtype) in JUMPS else [(False, states[-1]), (True, states.mean(0))]
        for is_mean, theirs in pools:
            ours = pooled(backend, [150], is_mean=is_mean)
            cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
            print(name, dtype, is_mean, np.abs(ours - theirs).max() / states.std(), 1 - cosine)
            assert np.abs(ours - theirs).mean() <= tolerance * states.std()
            assert cosine > 1 - tolerance


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("is_mean", [False, True])
def test_bits_do_not_depend_on_the_batch(checkpoints: dict[str, Path], executor: str, *, is_mean: bool) -> None:
    """A vector has the same bits whatever its chunks, and whatever else the passes compute."""
    backend = MAKERS[executor](checkpoints["qwen3-odd"], dtype="bfloat16", headless=True)
    found = {pooled(backend, c, is_mean=is_mean, others=o).tobytes() for c in CHUNKS for o in (0, 3)}
    assert len(found) == 1


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("is_mean", [False, True])
def test_prompt_that_fills_the_context(checkpoints: dict[str, Path], executor: str, *, is_mean: bool) -> None:
    """The last position of the context can be computed, with the bits that it has in a longer one."""
    lengths = (len(TOKENS), 1024)
    whole, longer = (MAKERS[executor](checkpoints["qwen3-odd"], headless=True, max_model_len=most) for most in lengths)
    for chunks in CHUNKS:
        assert pooled(whole, chunks, is_mean=is_mean).tobytes() == pooled(longer, chunks, is_mean=is_mean).tobytes()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_headless_checkpoint(tmp_path: Path, executor: str, checkpoints: dict[str, Path]) -> None:
    """A model that was saved without its head, under its own names, has the states of the whole one."""
    name = "qwen3-odd"
    AutoModel.from_pretrained(checkpoints[name], dtype=torch.float32).save_pretrained(tmp_path)
    assert "Qwen3Model" in (tmp_path / "config.json").read_text()
    alone, whole = (MAKERS[executor](path, headless=True) for path in (tmp_path, checkpoints[name]))
    assert pooled(alone, [150], is_mean=False).tobytes() == pooled(whole, [150], is_mean=False).tobytes()
    with pytest.raises(ValueError, match="Qwen3Model"):
        MAKERS[executor](tmp_path)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_columns_of_logits(checkpoints: dict[str, Path], executor: str) -> None:
    """Of a whole model, the outputs are logits, of which a reranker's two are returned."""
    backend = MAKERS[executor](checkpoints["llama"])
    batch = make_batch({"token_ids": TOKENS, "position": 0, "blocks": scattered_blocks(10, seed=1), "samples": False})
    (data,) = backend.step(attrs.evolve(batch, pooling=Pooling([0], [len(TOKENS) - 1], (7, 3)))).pooled
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0, -1, [7, 3]]
    assert np.frombuffer(data) == pytest.approx(theirs.numpy(), abs=1e-3)


CLASSIFIERS = [("llama", LlamaForSequenceClassification), ("qwen3-odd", Qwen3ForSequenceClassification)]


@pytest.mark.parametrize(("name", "cls"), CLASSIFIERS)
def test_classifier_without_its_head(tmp_path: Path, checkpoints: dict[str, Path], name: str, cls: Any) -> None:
    """Of a classifier the states are computed, and its head is read apart, which must have one label."""
    for num_labels in (2, 1):
        model = cls.from_pretrained(checkpoints[name], num_labels=num_labels, dtype=torch.float32)
        model.save_pretrained(tmp_path)
        config = backend_config(tmp_path, headless=True)
        if num_labels > 1:
            with pytest.raises(ValueError, match=r"score\.weight"):
                read_score_weight(config)
    ours = pooled(make_backend(tmp_path, headless=True), [150], is_mean=False) @ read_score_weight(config).numpy()
    with torch.inference_mode():
        theirs = float(model(torch.tensor([TOKENS])).logits[0, 0])
    assert ours == pytest.approx(theirs, abs=1e-4)
