"""Compare the greedy text of `--executor vllm` with transformers, on a small random model: cold, and behind a prefix.

    python -m tests.gpu.vllm_parity

Prints one JSON object. Texts may part where two tokens are nearly as likely, since both round in bfloat16. So each
token is judged by transformers' logits after the same tokens: `regret` is how much less likely than its own choice it
finds the token, in standard deviations of the logits. Exits with 1 if that is more than `ALLOWED` in either text.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from quipu.kernels.backend import LaunchedPass
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from tests.kernels.kernel_checkpoints import backend_config, make_checkpoint
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

ALLOWED = 0.3
SIZE = 32
LENGTH, OUTPUTS = 150, 32


def generate(backend: VllmBackend, tokens: list[int], blocks: list[int], *, start: int, slot: int) -> list[int]:
    """Compute a prompt from `start` on and draw, each pass launched before the last one is collected."""
    row: dict[str, Any] = {"blocks": blocks, "slot": slot}
    running: LaunchedPass = backend.launch(make_batch({**row, "position": start, "token_ids": tokens[start:]}))
    outputs = []
    for position in range(len(tokens), len(tokens) + OUTPUTS - 1):
        decode = {**row, "position": position, "token_ids": [0], "carried": True}
        following = backend.launch(make_batch({**decode, "output_position": 1 + position - len(tokens)}))
        outputs += running.collect().token_ids
        running = following
    return outputs + running.collect().token_ids


@torch.inference_mode()
def judged(model: Any, tokens: list[int], outputs: list[int]) -> tuple[int, float]:
    """Return how many of the tokens are transformers' own choice after the same tokens, and the largest regret."""
    ids = torch.tensor([tokens + outputs], device=model.device)
    logits_MV = model(ids).logits[0, len(tokens) - 1 : -1].float()
    chosen_M = logits_MV.gather(1, torch.tensor(outputs, device=model.device)[:, None])[:, 0]
    best_M = logits_MV.max(-1).values
    return int((chosen_M == best_M).sum()), float(((best_M - chosen_M) / logits_MV.std()).max())


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder, "model"), "qwen3-tied")
        backend = VllmBackend(backend_config(path, dtype="bfloat16", block_size=SIZE, enforce_eager=True))
        tokens = prompt(LENGTH, seed=7)
        first, second = scattered_blocks(24, seed=1)[:12], scattered_blocks(24, seed=1)[12:]
        shared = LENGTH // SIZE
        texts = [
            generate(backend, tokens, first, start=0, slot=0),
            generate(backend, tokens, first[:shared] + second[shared:], start=shared * SIZE, slot=1),
        ]
        library = backend.capabilities.library
        backend.close()

        from transformers import AutoModelForCausalLM

        place = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(place).eval()
        same, regrets = zip(*(judged(model, tokens, text) for text in texts), strict=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = {"device": device, "library": library, "tokens": OUTPUTS, "same": same, "regret": regrets}
    print(json.dumps(found), flush=True)
    return 0 if max(regrets) <= ALLOWED else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of vLLM's libraries would wait
