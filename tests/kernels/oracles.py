"""The logits that backends are compared with: transformers' and the reference's, computed once per session.

Logits are compared, not text. Argmax regret is transformers' logit at its own argmax minus transformers' logit at
ours: 0 where they agree, small where two candidates are nearly equal. Differences are given in units of the
logits' own standard deviation, so that a tolerance means the same for every checkpoint.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

NUM_PREFILL = 300  # a whole chunk of keys and part of the next
NUM_DECODES = 44  # into the fourth block
TOKENS = prompt(NUM_PREFILL + NUM_DECODES, seed=7)


@attrs.frozen
class Tolerance:
    """Allowed differences, in standard deviations of the logits."""

    regret: float
    mean: float
    p99: float


# float32: the same arithmetic in another order. bfloat16: transformers rounds every activation to 8 bits of mantissa,
# we round weights and KV only, so most of the difference is transformers' own distance from float32, and
# reference/test_parity.py shows that ours is the smaller.
TOLERANCES = {
    "float32": Tolerance(regret=1e-4, mean=1e-5, p99=5e-5),
    "bfloat16": Tolerance(regret=0.25, mean=0.04, p99=0.15),
}
# If the scores of a token's last chosen expert and the next are nearly equal, transformers' bfloat16 may swap them.
# YaRN and factors of queries make scores larger, and so what rounding them changes.
_SENSITIVE = (
    "qwen2-moe", "qwen3-moe", "olmoe", "qwen2-yarn", "gpt-oss", "deepseek-v2", "deepseek-v3", "glm4-moe", "granite-moe",
    "granite-4-moe", "phimoe", "gemma4", "ministral3",
)  # fmt: skip
_WIDER = {"bfloat16": Tolerance(regret=0.5, mean=0.04, p99=0.2)}
# SparseMixer's weights jump where a score leaves the range of another; copies of Gemma 3n's hidden state are sums of
# each other; Gemma 4's checkpoint has six layers of experts; sigmoids of Llama 4 are not smaller for an expert that
# another is nearly chosen instead of.
_JUMPS = {
    ("phimoe", "bfloat16"): Tolerance(regret=1.0, mean=0.05, p99=0.45),
    ("gemma3n", "bfloat16"): Tolerance(regret=0.5, mean=0.045, p99=0.3),
    ("gemma4", "bfloat16"): Tolerance(regret=1.0, mean=0.06, p99=0.5),
    ("llama4", "bfloat16"): Tolerance(regret=1.0, mean=0.04, p99=0.2),
    ("llama4-plain", "bfloat16"): Tolerance(regret=2.5, mean=0.04, p99=0.25),  # it has one expert for a token
}


def run(backend: Backend) -> torch.Tensor:
    """Return the logits of all TOKENS: one prefill, then steps of one token."""
    blocks = scattered_blocks(23, seed=1)
    prefill = make_batch({"token_ids": TOKENS[:NUM_PREFILL], "position": 0, "blocks": blocks})
    logits = [backend.logits(prefill, list(range(NUM_PREFILL)))]
    for position in range(NUM_PREFILL, len(TOKENS)):
        step = make_batch({"token_ids": [TOKENS[position]], "position": position, "blocks": blocks})
        logits.append(backend.logits(step, [0]))
    return torch.cat(logits)


@cache
def run_reference(path: Path, dtype: str) -> torch.Tensor:
    return run(make_backend(path, dtype=dtype))


@cache
@torch.inference_mode()
def run_transformers(path: Path, dtype: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0].float()
    return logits


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> Tolerance:
    spread = theirs.std().item()
    regret = theirs.max(-1).values - theirs.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    difference = (ours - theirs).abs().numpy()
    return Tolerance(
        regret=regret.max().item() / spread,
        mean=float(difference.mean()) / spread,
        p99=float(np.quantile(difference, 0.99)) / spread,
    )


def check(name: str, dtype: str, found: Tolerance, *, adapted: bool = False) -> None:
    """Check that the differences are within the tolerance for this dtype and checkpoint.

    `adapted`: the weights are changed by random adapters, after which the two best logits are nearly equal more often.
    """
    allowed = _WIDER.get(dtype, TOLERANCES[dtype]) if adapted or name in _SENSITIVE else TOLERANCES[dtype]
    allowed = _JUMPS.get((name, dtype), allowed)
    print(name, dtype, found)
    assert found.regret <= allowed.regret
    assert found.mean <= allowed.mean
    assert found.p99 <= allowed.p99
