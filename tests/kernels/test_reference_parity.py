"""The reference against transformers: prefill, then decode through the paged cache, on every family.

What is compared is logits, not text. Argmax regret is transformers' logit at its own argmax minus transformers' logit
at ours: 0 where they agree, small where two candidates are nearly level. Differences are given in units of the
logits' own standard deviation, so that a tolerance means the same for every checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from kernel_checkpoints import CONFIGS, make_backend, make_batch, prompt, scattered_blocks
from transformers import AutoModelForCausalLM

NUM_DECODES = 64
NUM_PREFILL = 300  # a whole chunk of keys and part of the next


@attrs.frozen
class Tolerance:
    """In standard deviations of the logits."""

    regret: float
    mean: float
    p99: float


# float32: the same arithmetic in another order. bfloat16: transformers rounds every activation to 8 bits of mantissa,
# we round weights and KV only, so most of the difference is transformers' own distance from float32, and the test
# below shows that ours is the smaller.
TOLERANCES = {
    "float32": Tolerance(regret=1e-4, mean=1e-5, p99=5e-5),
    "bfloat16": Tolerance(regret=0.25, mean=0.04, p99=0.15),
}
# A token whose last chosen expert and the next are nearly level goes to the other one in transformers' bfloat16.
_ROUTED = {"bfloat16": Tolerance(regret=0.5, mean=0.04, p99=0.15)}


def allowed_for(name: str, dtype: str) -> Tolerance:
    """What a checkpoint may differ by from transformers in the same dtype."""
    return _ROUTED.get(dtype, TOLERANCES[dtype]) if name == "qwen3-moe" else TOLERANCES[dtype]


def run_ours(path: Path, dtype: str, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position: the prefill's at once, the rest from one-token steps."""
    backend = make_backend(path, dtype=dtype)
    blocks = scattered_blocks(23, seed=1)
    prefill = make_batch({"token_ids": token_ids[:NUM_PREFILL], "position": 0, "blocks": blocks})
    logits = [backend.logits(prefill, list(range(NUM_PREFILL)))]
    for position in range(NUM_PREFILL, len(token_ids)):
        step = make_batch({"token_ids": [token_ids[position]], "position": position, "blocks": blocks})
        logits.append(backend.logits(step, [0]))
    return torch.cat(logits)


@torch.inference_mode()
def run_transformers(path: Path, dtype: str, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model(torch.tensor([token_ids])).logits[0].float()


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> Tolerance:
    spread = theirs.std().item()
    regret = theirs.max(-1).values - theirs.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    difference = (ours - theirs).abs().numpy()
    return Tolerance(
        regret=regret.max().item() / spread,
        mean=float(difference.mean()) / spread,
        p99=float(np.quantile(difference, 0.99)) / spread,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Every position's logits agree within the tolerances, and bfloat16 lies no further off than transformers' own."""
    token_ids = prompt(NUM_PREFILL + NUM_DECODES, seed=7)
    exact = run_transformers(checkpoints[name], "float32", token_ids)
    assert exact.std() > 0.5, "logits too flat to tell a wrong model from a right one"
    ours = {dtype: run_ours(checkpoints[name], dtype, token_ids) for dtype in TOLERANCES}
    theirs = run_transformers(checkpoints[name], "bfloat16", token_ids)
    for dtype, peer in (("float32", exact), ("bfloat16", theirs)):
        found, allowed = differences(ours[dtype], peer), allowed_for(name, dtype)
        print(name, dtype, found)
        assert found.regret <= allowed.regret
        assert found.mean <= allowed.mean
        assert found.p99 <= allowed.p99
    print(name, "to float32: ours", differences(ours["bfloat16"], exact), "theirs", differences(theirs, exact))
    assert differences(ours["bfloat16"], exact).mean <= differences(theirs, exact).mean
