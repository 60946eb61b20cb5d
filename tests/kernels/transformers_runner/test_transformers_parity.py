"""Logits of families without kernels of ours, however they are computed, beside transformers' for the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quipu.kernels.models.families import FAMILIES
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.kernels.transformers_runner.foreign_families import CONFIGS, make_model, make_transformers_backend

LENGTH, CHUNK, WARM = 100, 37, 64
TOKENS, BESIDE = prompt(LENGTH, seed=3), prompt(60, seed=4)
DECODED = (99, 45)
"""Positions that decode beside chunks: their contexts differ, so that the shorter one is padded."""
TOLERANCE = 2e-5
"""Of the logits' standard deviation."""


@torch.inference_mode()
def logits_of_their_own(folder: Path, *texts: list[int]) -> list[torch.Tensor]:
    """Return transformers' logits of each text, computed alone and at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [model(torch.tensor([text])).logits[0] for text in texts]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(tmp_path: Path, name: str) -> None:
    """Cold, in chunks beside rows that decode, behind another's prefix, and in draft rows: transformers' logits."""
    folder = make_model(tmp_path / name, CONFIGS[name]())
    whole, other = logits_of_their_own(folder, TOKENS, BESIDE)
    backend = make_transformers_backend(folder)
    first, second, own = scattered_blocks(7, seed=1), scattered_blocks(24, seed=2)[7:14], scattered_blocks(30, seed=1)
    tail, beside = own[7:11], own[11:15]

    row = {"token_ids": TOKENS, "position": 0, "blocks": first}
    cold = backend.logits(make_batch(row, {"token_ids": BESIDE, "position": 0, "blocks": beside}), [*range(160)])
    pairs = [(cold[:LENGTH], whole), (cold[LENGTH:], other)]

    decoding = [{"token_ids": [TOKENS[at]], "position": at, "blocks": first, "slot": at % 8} for at in DECODED]
    for start in range(0, LENGTH, CHUNK):
        chunk = {"token_ids": TOKENS[start : start + CHUNK], "position": start, "blocks": second, "slot": 6}
        batch = make_batch(decoding[0], chunk, decoding[1])
        logits = backend.logits(batch, list(range(len(batch.token_ids))))
        pairs += [(logits[1:-1], whole[start : start + CHUNK]), (logits[[0, -1]], whole[list(DECODED)])]

    # the rest behind a prefix that another sequence has computed, then the last tokens again, each in a row of its own
    warm = [*first[: WARM // 16], *tail]
    rest = backend.logits(make_batch({"token_ids": TOKENS[WARM:], "position": WARM, "blocks": warm}), [*range(36)])
    drafted = [{"token_ids": [TOKENS[at]], "position": at, "blocks": warm} for at in range(93, LENGTH)]
    pairs += [(rest, whole[WARM:]), (backend.logits(make_batch(*drafted), [*range(7)]), whole[93:])]

    spread = float(whole.std())
    differences = [float((ours - theirs).abs().max()) / spread for ours, theirs in pairs]
    assert max(differences) < TOLERANCE, differences


def test_families_are_not_ours() -> None:
    """Ten families, at least, of which we have no kernels."""
    named = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config().model_type] for config in CONFIGS.values()}
    assert len(named - FAMILIES.keys()) >= 10
