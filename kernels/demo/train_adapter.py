"""Train the demo's adapter: low-rank matrices beside the shipped weights, after which it answers like a pirate.

    python -m quipu.kernels.demo.train_adapter FOLDER [--steps 600] [--rank 4] [--seed 0]

writes FOLDER as PEFT saves an adapter, for `quipu serve --lora-modules NAME=FOLDER`. The chats are those that the model
itself was trained on, from other seeds, with the answers in another tone (`text/pirate.py`); seed and step alone make a
batch. docs/internals/demo-model.md says how the shipped adapter was made.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .chat_encoder import CHECKPOINT, VOCAB_SIZE, ChatEncoder
from .text.chat_mixture import draw_document_chat, draw_short_chat
from .text.chats import Chat
from .text.pirate import in_tone
from .train import MAX_FACTS, TOKENS_PER_FACT
from .transformer import Shape, Transformer

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FIRST_SEED = 1 << 32
"""Far from the seeds of the model's own batches, and below those that are held out."""


@dataclass(frozen=True)
class AdapterRecipe:
    """Everything that the adapter depends on, but for the code, the shipped weights and the machine."""

    seed: int = 0
    steps: int = 600
    rank: int = 4
    alpha: int = 8
    rows: int = 4
    row_length: int = 512
    document_share: float = 0.5
    rate: float = 0.004
    warm_up: int = 20


class LowRankLinear(nn.Module):
    """A frozen product and the low-rank one that is added to it (Hu et al., arXiv:2106.09685)."""

    def __init__(self, frozen: nn.Linear, recipe: AdapterRecipe) -> None:
        super().__init__()
        self.frozen = frozen
        self.scale = recipe.alpha / recipe.rank
        self.a_RI = nn.Parameter(torch.empty(recipe.rank, frozen.in_features))
        self.b_OR = nn.Parameter(torch.zeros(frozen.out_features, recipe.rank))
        nn.init.kaiming_uniform_(self.a_RI, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.scale * ((x @ self.a_RI.T) @ self.b_OR.T)
        return out


class AdapterRun:
    """A training run: the frozen model, and the matrices beside it."""

    def __init__(self, recipe: AdapterRecipe) -> None:
        self.recipe = recipe
        self.encoder = ChatEncoder()
        torch.manual_seed(recipe.seed)
        self.model = shipped_model().requires_grad_(False)
        self.adapted: dict[str, LowRankLinear] = {}
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, last = name.rpartition(".")
                self.adapted[name] = LowRankLinear(module, recipe)
                setattr(self.model.get_submodule(parent), last, self.adapted[name])
        matrices = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(matrices, lr=recipe.rate, weight_decay=0.0)

    def batch(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return rows (B, T) of chats in the tone, and which of their tokens (B, T) the model has to write."""
        random = Random(_FIRST_SEED + self.recipe.seed * 1_000_003 + step)
        token_ids, written = zip(*(self._row(random) for _ in range(self.recipe.rows)), strict=True)
        return np.stack(token_ids), np.stack(written)

    def _row(self, random: Random) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        length = self.recipe.row_length
        separator = [self.encoder.token_id("<|endoftext|>")]
        ids: list[int] = []
        written: list[bool] = []
        chats = self._chats(random)
        while len(ids) < length:
            more, mask = self.encoder.encode(in_tone(next(chats)))
            ids += [*more.tolist(), *separator]
            written += [*mask.tolist(), False]
        return np.array(ids[:length], dtype=np.int64), np.array(written[:length], dtype=np.bool_)

    def _chats(self, random: Random) -> Iterator[Chat]:
        if random.random() < self.recipe.document_share:
            yield draw_document_chat(random, min(MAX_FACTS, (self.recipe.row_length - 160) // TOKENS_PER_FACT))
        while True:
            yield draw_short_chat(random)

    def train_step(self, step: int) -> float:
        """Update the matrices by the batch of `step`, and return its loss, in nats a token."""
        recipe = self.recipe
        rate = recipe.rate * min(1.0, (step + 1) / recipe.warm_up) * (1 - step / recipe.steps)
        self.optimizer.param_groups[0]["lr"] = rate
        token_ids, is_written = map(torch.from_numpy, self.batch(step))
        wanted = is_written[:, 1:]
        logits = self.model.logits(self.model(token_ids)[:, :-1][wanted])
        loss = F.cross_entropy(logits, token_ids[:, 1:][wanted])
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(value := loss.item()):
            raise RuntimeError(f"the loss of step {step} is {value}")
        return value

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo", "r": self.recipe.rank,
            "lora_alpha": self.recipe.alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": list(MODULES),
            "inference_mode": True,
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {}
        for name, adapted in self.adapted.items():
            prefix = f"base_model.model.model.{name}"
            for end, value in (("lora_A", adapted.a_RI), ("lora_B", adapted.b_OR)):
                tensors[f"{prefix}.{end}.weight"] = value.detach().to(torch.bfloat16).contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone


def shipped_model() -> Transformer:
    """Return the demo model with the weights that are part of the package."""
    model = Transformer(Shape(VOCAB_SIZE))
    weights = load_file(CHECKPOINT / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's adapter.")
    parser.add_argument("folder", type=Path, help="folder to write the adapter to")
    for name, default in asdict(AdapterRecipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    run = AdapterRun(AdapterRecipe(**options))
    started_s = time.monotonic()
    for step in range(run.recipe.steps):
        loss = run.train_step(step)
        if (step + 1) % 20 == 0:
            print(json.dumps({"step": step + 1, "loss": round(loss, 4), "s": round(time.monotonic() - started_s)}))
    run.save(folder)


if __name__ == "__main__":
    main()
