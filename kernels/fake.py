"""A backend without a model, whose tokens depend on what it reads through the block tables.

Each KV slot holds a number made from the token and its position; a drawn token is a hash of all slots from position 0
to the row's last one, read back through the row's block table. So a stale, swapped, shared-too-early or prematurely
freed block changes the text, and `continuation` says what the text should have been.

Used by tests, benchmarks of everything around the model, and `quipu serve --executor fake`. It has dials for faults.
"""

from __future__ import annotations

import attrs

from quipu.kernels.backend import BackendConfig, Capabilities
from quipu.kernels.batch import Drawn, StepBatch

_MASK = (1 << 61) - 1


class FakeFault(RuntimeError):
    """The fault that a dial asked for, or a read that no correct engine makes."""


@attrs.define
class Dials:
    """What goes wrong, and how long a step takes."""

    step_seconds: float = 0.0
    """How long the executor waits before it answers for a pass."""
    poison_token_id: int | None = None
    """A pass that is fed this token raises."""
    fail_steps: int = 0
    """So many of the next passes raise, after having written half of their KV."""
    first_token_id: int = 32
    """Drawn tokens are drawn from here..."""
    num_token_ids: int = 200
    """...so many of them on."""
    eos_after: int | None = None
    """Draw `eos_token_id` as this output (counted from 0)."""
    eos_token_id: int = 0


class FakeBackend:
    """The whole Backend protocol, in plain Python."""

    def __init__(self, config: BackendConfig, dials: Dials | None = None) -> None:
        self.dials = dials or Dials()
        self.num_passes = 0
        self.num_tokens = 0
        self._block_size = config.block_size
        self._slots: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self._last_drawn = [0] * config.max_num_seqs

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="fake", dtype="none", invariant=True)

    def step(self, batch: StepBatch) -> Drawn:
        dials, size = self.dials, self._block_size
        self.num_passes += 1
        failing = dials.fail_steps > 0
        if failing:
            dials.fail_steps -= 1
        rows = range(len(batch.slots))
        for row in rows:
            if failing and row >= len(batch.slots) / 2:
                raise FakeFault("the dial said that this pass fails")
            begin, end = batch.query_start[row], batch.query_start[row + 1]
            token_ids = batch.token_ids[begin:end]
            if batch.carried[row]:
                token_ids = [self._last_drawn[batch.slots[row]]]
            if dials.poison_token_id in token_ids:
                raise FakeFault("the batch holds the poisoned token")
            position, table = batch.positions[row], batch.block_tables[row]
            for token_id in token_ids:
                self._slots[table[position // size]][position % size] = slot_value(token_id, position)
                position += 1
            self.num_tokens += len(token_ids)
        if failing:
            raise FakeFault("the dial said that this pass fails")
        drawing = [row for row in rows if batch.samples[row]]
        drawn = [self._draw(batch, row) for row in drawing]
        for row, token_id in zip(drawing, drawn, strict=True):
            self._last_drawn[batch.slots[row]] = token_id
        return Drawn(rows=drawing, token_ids=drawn)

    def close(self) -> None:
        self._slots = []

    def _draw(self, batch: StepBatch, row: int) -> int:
        size, table = self._block_size, batch.block_tables[row]
        length = batch.positions[row] + batch.query_start[row + 1] - batch.query_start[row]
        slots: list[int | None] = []
        for block in table[: -(-length // size)]:
            slots += self._slots[block]
        del slots[length:]
        values = [value for value in slots if value is not None]
        if len(values) < length:
            raise FakeFault(f"a slot was read that no pass has written (position {slots.index(None)})")
        seed = batch.seed[row] if batch.temperature[row] > 0 else 0
        return draw(values, seed, batch.output_position[row], self.dials)


def slot_value(token_id: int, position: int) -> int:
    """What a pass writes to the KV slot of `token_id` at `position`."""
    return (token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1) & _MASK


def draw(values: list[int], seed: int, output_position: int, dials: Dials) -> int:
    """The token that follows KV slots `values`."""
    if dials.eos_after == output_position:
        return dials.eos_token_id
    mixed = hash((seed & _MASK, output_position, *values))
    return dials.first_token_id + (mixed & _MASK) % dials.num_token_ids


def continuation(token_ids: list[int], count: int, dials: Dials | None = None, seed: int = 0) -> list[int]:
    """What a correct engine draws after `token_ids`, whatever its batches, caches and preemptions."""
    dials = dials or Dials()
    values = [slot_value(token_id, position) for position, token_id in enumerate(token_ids)]
    outputs: list[int] = []
    for position in range(count):
        outputs.append(draw(values, seed, position, dials))
        values.append(slot_value(outputs[-1], len(values)))
    return outputs
