"""transformers behind the thin server: static batches of prompts of equal length.

It has no continuous batching on CPUs and no prefix cache: later requests wait, and a warm prompt costs as much as a
cold one. Weights, keys and values are bfloat16 if the processor has instructions for it, otherwise float32, because
torch is many times slower without them. `TRANSFORMERS_DTYPE` overrides this.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
import transformers

MAX_BATCH = 64


class TransformersEngine:
    gather_s = 0.03

    def __init__(self, model: str) -> None:
        flags = Path("/proc/cpuinfo").read_text().split()
        default = "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
        name = os.environ.get("TRANSFORMERS_DTYPE", default)
        dtype = getattr(torch, name)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained  # untyped
        self._model = load(model, dtype=dtype).eval()
        self.info = {
            "version": transformers.__version__,
            "weights": name,
            "kv": name,
            "prefix_cache": False,
        }
        self._waiting: list[tuple[int, list[int], int]] = []
        self._running: list[list[int]] = []  # number, tokens left
        self._past: Any = None
        self._last_B1: torch.Tensor | None = None

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((number, prompt, max_tokens))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int, bool]]:
        if self._running:
            fed_BL = self._last_B1
        else:
            length = len(self._waiting[0][1])
            batch = [one for one in self._waiting if len(one[1]) == length][:MAX_BATCH]
            self._waiting = [one for one in self._waiting if one not in batch]
            self._running = [[number, max_tokens] for number, _, max_tokens in batch]
            self._past = None
            fed_BL = torch.tensor([prompt for _, prompt, _ in batch])
        output = self._model(input_ids=fed_BL, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = output.past_key_values
        self._last_B1 = output.logits[:, -1].argmax(-1, keepdim=True)
        drawn = []
        for row, (number, num_left) in enumerate(self._running):
            if num_left > 0:  # others in the batch may be longer
                drawn.append((number, int(self._last_B1[row, 0]), num_left == 1))
            self._running[row][1] -= 1
        if all(num_left <= 0 for _, num_left in self._running):
            self._running = []
        return drawn


def load(model: str) -> TransformersEngine:
    return TransformersEngine(model)
