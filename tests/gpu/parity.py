"""Compare logits of small random checkpoints of every family with the reference's: prompts, chunks, decode, graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import attrs
import torch

from quipu.kernels.reference.reference_backend import ReferenceBackend
from quipu.kernels.triton.triton_backend import TritonBackend
from tests.gpu.machine import Machine
from tests.gpu.random_adapter import save_adapter
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import backend_config, make_checkpoint
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

# In standard deviations of the logits. In bfloat16 the reference still computes in float32, so the difference is the
# rounding of every operation.
ALLOWED = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.5)}
"""Mean and maximum difference."""


def families(machine: Machine) -> list[dict[str, Any]]:
    """Compare each family in each dtype: a prompt in two chunks, then single tokens, teacher-forced."""
    cases = [(name, dtype, "fast") for name in CONFIGS for dtype in ALLOWED]
    cases += [(name, "bfloat16", "strict") for name in CONFIGS]
    adapted = [("llama", "bfloat16", "fast"), ("qwen3-moe", "float32", "fast"), ("phi3", "bfloat16", "strict")]
    if machine.rehearsal:
        cases, adapted = [("llama", "float32", "fast")], [("llama", "float32", "fast")]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: make_checkpoint(Path(folder, name), name) for name in {name for name, _, _ in cases}}
        rows = [_family(machine, paths[name], name, dtype, determinism) for name, dtype, determinism in cases]
        return rows + [_family(machine, paths[name], name, *kind, adapted=True) for name, *kind in adapted]


def _family(
    machine: Machine, path: Path, name: str, dtype: str, determinism: str, *, adapted: bool = False
) -> dict[str, Any]:
    """Compare one family; `adapted`: with an adapter of every module, beside rows of another and of none."""
    length, decoded = (20, 2) if machine.rehearsal else (300, 64)
    sizes = {"max_num_batched_tokens": 48, "max_model_len": 48} if machine.rehearsal else {}
    config = backend_config(path, dtype=dtype, determinism=determinism, max_loras=2 * adapted, **sizes)
    ours, theirs = TritonBackend(config, machine.device, machine.tiles), ReferenceBackend(config)
    ours.cache.fill(float("nan"))
    adapters = _load_adapters(path, ours, theirs) if adapted else []
    ours_MV, theirs_MV = (_logits(backend, length, decoded, adapters) for backend in (ours, theirs))
    difference = (ours_MV - theirs_MV).abs() / theirs_MV.std()
    best = ours_MV.argmax(-1, keepdim=True)
    regret = ((theirs_MV.max(-1).values - theirs_MV.gather(1, best)[:, 0]) / theirs_MV.std()).max().item()
    mean, largest = difference.mean().item(), difference.max().item()
    result = {
        "name": f"{name}, {dtype}, {determinism}{', adapters' * adapted}",
        "mean_difference": mean,
        "largest_difference": largest,
        "regret": regret,
        "replayed": ours.runner.num_replayed,
        "ok": mean <= ALLOWED[dtype][0] and largest <= ALLOWED[dtype][1],
    }
    ours.close()
    return result


def _load_adapters(path: Path, ours: TritonBackend, theirs: ReferenceBackend) -> list[str]:
    """Load two into both, and return their digests."""
    digests = []
    for seed, rank in enumerate((16, 5)):
        folder = path / f"adapter-{seed}-{uuid4()}"
        save_adapter(folder, ours.named_weights.linear, rank=rank, seed=seed)
        digests.append(theirs.load_adapter(folder, ours.load_adapter(folder)))
    return digests


def _logits(backend: TritonBackend | ReferenceBackend, length: int, decoded: int, adapters: list[str]) -> torch.Tensor:
    """Return the logits of every position; with adapters, those of the first, beside rows of each and of none."""
    token_ids = prompt(length + decoded, seed=7)
    count = -(-len(token_ids) // 16)
    *blocks, first, second, third = scattered_blocks(count + 3, seed=1)
    beside = [first, second, third]
    results, position = [], 0
    for size in [length // 3, length - length // 3, *[1] * decoded]:
        batch = make_batch({"token_ids": token_ids[position : position + size], "position": position, "blocks": blocks})
        if adapters:
            others = [{"token_ids": [at], "position": 0, "blocks": [beside[at]], "slot": 1 + at} for at in range(3)]
            mine = {"token_ids": token_ids[position : position + size], "position": position, "blocks": blocks}
            batch = attrs.evolve(make_batch(mine, *others), adapters=[adapters[0], adapters[1], "", adapters[0]])
        results.append(backend.logits(batch, list(range(size))))
        position += size
    return torch.cat(results)
