"""Train the demo model from scratch, on text that `text/` makes up while it goes.

    python -m quipu.kernels.demo.train RUN [--minutes 10] [--seed 0] [--steps 5000]

trains in the folder RUN for that many minutes, and goes on from there when called again, until all steps are done; then
RUN/checkpoint is what `quipu serve` loads. A seed gives the same batches on every machine, however often a run stops.
docs/internals/demo-model.md says how the shipped weights were made.

Muon (Jordan et al., 2024) updates the matrices of the layers, AdamW the embedding and the norms' gains. The learning
rate is constant, then falls linearly to zero. Rows become longer as training goes on (`row_length`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .chat_encoder import VOCAB_SIZE, ChatEncoder
from .checkpoint_files import save_checkpoint
from .copying import repeated_facts, repeated_tokens
from .probes import measure
from .text.chat_mixture import draw_document_chat, draw_short_chat
from .text.chats import Chat
from .transformer import Shape, Transformer

TOKENS_PER_FACT, MAX_FACTS = 36, 42
OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""Matrices that add to the residual stream: updated less, or their sums drown which token a position has."""
COPYING_ROW, SHORTEST_ROW, LONGEST_ROW = 128, 384, 2048


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on, but for the code and the machine."""

    seed: int = 0
    steps: int = 5000
    tokens_per_step: int = 4096
    document_share: float = 0.6
    context_share: float = 0.1
    context_weight: float = 0.5
    muon_rate: float = 0.02
    output_rate: float = 1.0
    output_decay: float = 0.5
    adam_rate: float = 0.01
    weight_decay: float = 0.05
    warm_up: int = 50
    copying_steps: int = 150
    looking_steps: int = 500
    repetition_steps: int = 1000
    short_steps: int = 900
    growing_steps: int = 2100
    cool_down: float = 0.68
    shape: Shape = field(default_factory=lambda: Shape(VOCAB_SIZE))

    def row_length(self, step: int) -> int:
        """Return the length of the rows of `step`: 128 before any text, then 384, growing to 2,048."""
        if step < self.looking_steps:
            return COPYING_ROW
        grown = min(1.0, max(0.0, step - self.short_steps) / self.growing_steps)
        return SHORTEST_ROW + 128 * int(grown * (LONGEST_ROW - SHORTEST_ROW) / 128)

    def repetition(self, step: int) -> float:
        """Return the share of short chats that only repeat words, besides those in the mixture."""
        return 0.5 * max(0.0, 1 - step / self.repetition_steps)

    @property
    def first_cooler_step(self) -> int:
        """The step from which on the learning rate falls."""
        return round(self.steps * (1 - self.cool_down))

    def rate(self, step: int) -> float:
        """Return the learning rate of `step` as a share of the highest."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return warm * min(1.0, (self.steps - step) / (self.steps - self.first_cooler_step))


@dataclass(frozen=True)
class Batch:
    """Rows of token ids (B, T), and the weight (B, T) of predicting each from those before it."""

    token_ids: NDArray[np.int64]
    weights: NDArray[np.float32]


class BatchMaker:
    """Makes the batch of each step, from the recipe's seed and the step alone."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.encoder = ChatEncoder()

    def make(self, step: int) -> Batch:
        random = Random(self.recipe.seed * 1_000_003 + step)
        length = self.recipe.row_length(step)
        rows = [self._row(random, step) for _ in range(max(1, self.recipe.tokens_per_step // length))]
        token_ids, weights = zip(*rows, strict=True)
        return Batch(np.stack(token_ids), np.stack(weights))

    def _row(self, random: Random, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        length = self.recipe.row_length(step)
        if step < self.recipe.looking_steps:
            make = repeated_tokens if step < self.recipe.copying_steps else repeated_facts
            return make(np.random.default_rng(random.getrandbits(64)), length, self.recipe.shape.vocab_size)
        chats = self._chats(random, length, self.recipe.repetition(step))
        token_ids = np.empty(0, dtype=np.int64)
        written = np.empty(0, dtype=np.bool_)
        separator = np.array([self.encoder.token_id("<|endoftext|>")])
        while len(token_ids) < length:
            ids, mask = self.encoder.encode(next(chats))
            token_ids = np.concatenate((token_ids, ids, separator))
            written = np.concatenate((written, mask, [False]))
        sampled = np.random.default_rng(random.getrandbits(64)).random(length) < self.recipe.context_share
        weights = np.where(written[:length], 1.0, self.recipe.context_weight * sampled)
        return token_ids[:length], weights.astype(np.float32)

    def _chats(self, random: Random, length: int, repetition: float) -> Iterator[Chat]:
        """Yield the chats of a row: about a document that nearly fills it, in some rows, then short ones."""
        if random.random() < self.recipe.document_share:
            yield draw_document_chat(random, min(MAX_FACTS, (length - 160) // TOKENS_PER_FACT))
        while True:
            yield draw_short_chat(random, repetition)


def loss_of(model: Transformer, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the cross entropy, in nats a token, and the mean of what the model has to write."""
    token_ids = torch.from_numpy(batch.token_ids).to(device)
    weights = torch.from_numpy(batch.weights).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model(token_ids)[:, :-1]
        wanted = weights[:, 1:] > 0
        logits = model.logits(hidden[wanted])
    losses = F.cross_entropy(logits.float(), token_ids[:, 1:][wanted], reduction="none")
    weights = weights[:, 1:][wanted]
    return (losses * weights).sum() / weights.sum(), losses.detach()[weights == 1].mean()


class Run:
    """A training run in a folder: its state, its log, and its checkpoint."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(recipe.seed)
        self.model = Transformer(recipe.shape).to(self.device)
        matrices = {name for name, value in self.model.named_parameters() if value.ndim == 2 and "embed" not in name}
        parameters = dict(self.model.named_parameters())
        self.optimizers = [
            torch.optim.Muon(
                [value for name, value in parameters.items() if name in matrices and not name.endswith(OUTPUTS)],
                lr=recipe.muon_rate, momentum=0.95, weight_decay=recipe.weight_decay,
            ),
            torch.optim.Muon(
                [value for name, value in parameters.items() if name.endswith(OUTPUTS)],
                lr=recipe.muon_rate * recipe.output_rate, momentum=0.95, weight_decay=recipe.output_decay,
            ),
            torch.optim.AdamW(
                [value for name, value in parameters.items() if name not in matrices],
                lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0,
            ),
        ]  # fmt: skip
        self.rates = (recipe.muon_rate, recipe.muon_rate * recipe.output_rate, recipe.adam_rate)
        self.step = 0
        self.seconds = 0.0
        self.batches = BatchMaker(recipe)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").exists():
            self._load()

    def train(self, minutes: float, probe_every: int) -> None:
        """Train for `minutes` or until the last step, and save; `probe_every`: steps, 0 for never."""
        started = last_saved = time.monotonic()
        begin_s = self.seconds
        losses: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self.batches.make, self.step)
            while self.step < self.recipe.steps and time.monotonic() < started + 60 * minutes:
                batch = following.result()
                following = pool.submit(self.batches.make, self.step + 1)
                losses.append(self.train_step(batch))
                self.seconds = begin_s + time.monotonic() - started
                if self.step % 20 == 0 or self.step == self.recipe.steps:
                    self._log(loss=round(sum(losses) / len(losses), 4), row=batch.token_ids.shape[1])
                    losses.clear()
                if probe_every and (self.step % probe_every == 0 or self.step == self.recipe.steps):
                    shares = measure(self.model, self.batches.encoder, self.device)
                    self._log(**{name: round(share, 3) for name, share in shares.items()})
                if time.monotonic() > last_saved + 300:
                    self.save()
                    last_saved = time.monotonic()
        self.save()

    def train_step(self, batch: Batch) -> float:
        """Update the weights by the batch of this step, and return its loss of what the model has to write."""
        rate = self.recipe.rate(self.step)
        for optimizer, highest in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * highest
        loss, written_loss = loss_of(self.model, batch, self.device)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(value := written_loss.item()):
            raise RuntimeError(f"the loss of step {self.step} is {value}")
        self.step += 1
        return value

    def _log(self, **values: Any) -> None:
        num_tokens = self.step * self.recipe.tokens_per_step
        line = {"step": self.step, "tokens": num_tokens, "s": round(self.seconds), **values}
        print(json.dumps(line), flush=True)
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def save(self) -> None:
        state = {
            "recipe": asdict(self.recipe), "step": self.step, "seconds": self.seconds, "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }  # fmt: skip
        torch.save(state, self.folder / "state.pt.new")
        (self.folder / "state.pt.new").replace(self.folder / "state.pt")
        save_checkpoint(self.folder / "checkpoint", self.recipe.shape, dict(self.model.named_parameters()))

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        theirs = Recipe(**{**state["recipe"], "shape": Shape(**state["recipe"]["shape"])})
        # until the learning rate falls, nothing depends on when the run ends
        if state["step"] <= min(theirs.first_cooler_step, self.recipe.first_cooler_step):
            theirs = replace(theirs, steps=self.recipe.steps, cool_down=self.recipe.cool_down)
        if self.recipe != theirs:
            raise SystemExit(f"{self.folder} has a run by another recipe: {state['recipe']}")
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("folder", type=Path, help="folder of the run, which goes on if there is one")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to train in this sitting (10)")
    parser.add_argument("--probe-every", type=int, default=200, help="steps between two measurements (200), 0 for none")
    for name, default in asdict(Recipe()).items():
        if name != "shape":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name, default in asdict(Shape(VOCAB_SIZE)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    shape = Shape(**{name: options.pop(name) for name in asdict(Shape(VOCAB_SIZE))})
    folder, minutes, probe_every = (options.pop(name) for name in ("folder", "minutes", "probe_every"))
    Run(folder, Recipe(shape=shape, **options)).train(minutes, probe_every)


if __name__ == "__main__":
    main()
