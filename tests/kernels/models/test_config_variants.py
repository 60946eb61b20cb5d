"""Each entry that a family reads is computed as transformers computes it, or refused.

Configurations differ in one entry from those of the tests' checkpoints (`config_variants.py`); the others are compared
elsewhere (`../reference/test_parity.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quipu.kernels.models.families import find_family
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import make_backend, make_model
from tests.kernels.models.config_variants import (
    UNVARIED,
    VARIANTS,
    Variant,
    candidates_of,
    had_by,
    read_by,
    why_refused,
)
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

TOKENS = prompt(110, seed=11)
BLOCKS = scattered_blocks(7, seed=2)
MOST_MEAN, MOST = 2e-5, 3e-3
"""Differences in standard deviations of the logits: other orders of the same sums in float32."""


def save(folder: Path, variant: Variant) -> torch.Tensor:
    """Save a variant with random weights as transformers does; return its logits."""
    data = variant.config()
    entries = {key: value for key, value in data.items() if key not in ("architectures", "model_type")}
    config = type(CONFIGS[variant.name]())(**entries)
    config._attn_implementation = "eager"  # noqa: SLF001 -- from_config has no other way
    model = make_model(variant.name, config).eval()
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def logits_of(folder: Path) -> torch.Tensor:
    """Return ours, computed in two chunks."""
    backend, found = make_backend(folder, dtype="float32"), []
    for start, end in ((0, 80), (80, len(TOKENS))):
        batch = make_batch({"token_ids": TOKENS[start:end], "position": start, "blocks": BLOCKS})
        found.append(backend.logits(batch, list(range(end - start))))
    return torch.cat(found)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=str(variant), marks=() if is_often else pytest.mark.slow)
        for variant, is_often in VARIANTS
    ],
)
def test_computed_as_in_transformers_or_refused(tmp_path: Path, variant: Variant) -> None:
    """Compute transformers' logits in float32, or refuse what is known to be refused, and nothing else."""
    theirs = save(tmp_path, variant)
    if (reason := why_refused(variant)) is not None:
        with pytest.raises(ValueError, match=reason):
            make_backend(tmp_path, dtype="float32")
        return
    assert theirs.isfinite().all()
    difference = (logits_of(tmp_path) - theirs).abs() / theirs.std()
    assert float(difference.mean()) < MOST_MEAN and float(difference.max()) < MOST


@pytest.mark.parametrize("name", CONFIGS)
def test_absent_entries_follow_from_others(name: str) -> None:
    """Parse what an author writes as what transformers writes, which fills in what follows from other entries."""
    for variant in [variant for variant, _ in VARIANTS if variant.name == name and why_refused(variant) is None]:
        data = variant.config()
        entries = {key: value for key, value in data.items() if key not in ("architectures", "model_type")}
        written = json.loads(type(CONFIGS[name]())(**entries).to_json_string(use_diff=False))
        written["architectures"] = data["architectures"]
        assert find_family(data).parse(data) == find_family(written).parse(written), str(variant)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_entry_is_varied(name: str) -> None:
    """Have a variant of each entry that a family reads and transformers' class has, or know why there is none."""
    family = read_by(name)
    same = [other for other in CONFIGS if read_by(other) == family]
    varied = {variant.key for other in same for variant in candidates_of(other)}
    unused = {"head_dim", "num_key_value_heads"} if "kv_lora_rank" in family else set()  # latents have neither
    assert (family & had_by(name)) - varied - unused - UNVARIED == frozenset()
