"""A backend without a model, whose tokens depend on what it reads through the block tables.

Each KV slot holds a number computed from the token and its position; a drawn token is a hash of all slots from
position 0 to the row's last one, read through the row's block table. So a stale, swapped, prematurely shared or
prematurely freed block changes the output.

Used by tests, by benchmarks of everything around the model, and by `--executor fake`. `Dials` inject faults.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from .adapters.adapter_folder import read_adapter_files
from .backend import BackendConfig, Capabilities, KVMemory, MemoryPlan, RunsAtOnce, SharesBlocks
from .batch import Drawn, Pooling, Scoring, StepBatch
from .fake_blocks import SLOT_BYTES, UNWRITTEN, FakeBlocks
from .fake_rules import draw_by_rules, masked
from .fake_scores import MASK, VECTOR_SIZE, cheap_scores, made_up_output, score, slot_value
from .step_types import Scores

_DEFAULT_CONTEXTS = 16
_MOST_ADAPTER_BYTES = 1 << 30
NONSENSE = 1 << 30
"""A draft token that is never right: no position that is kept may hold it."""
_ANY = -1
"""The key of a reply to every sequence."""


class FakeFault(RuntimeError):
    """An injected fault, or a read that a correct engine never makes."""


@attrs.define
class Dials:
    """Injected faults, and the duration of a step."""

    step_seconds: float = 0.0
    """How long the executor waits before it reports a pass."""
    move_seconds: float = 0.0
    """How long the mover waits before it copies."""
    poison_token_id: int | None = None
    """A pass with this input token raises."""
    max_tokens_in_memory: int | None = None
    """A pass over more tokens than this runs out of memory."""
    hungry_token_id: int | None = None
    """A pass over a sequence with this input token runs out of memory, however small it is."""
    nan_token_id: int | None = None
    """A row that draws, and has this input token, has NaN logits."""
    fail_steps: int = 0
    """This many of the next passes raise, after writing half of their KV."""
    first_token_id: int = 32
    """Drawn ids start here..."""
    num_token_ids: int = 200
    """...and there are this many of them."""
    eos_after: int | None = None
    """Draw `eos_token_id` as this output (counted from 0)."""
    eos_token_id: int = 0
    replies: Mapping[int, Sequence[int]] = attrs.field(factory=dict)
    """By token: what a sequence that contains it draws, followed by `eos_token_id`; the last that fits counts. -1 fits
    every sequence and, if alone, reads no KV. Empty: drawn tokens are hashes."""
    most_tokens: int = 1
    """Tokens that a sequence may yield in a step, if its executor drafts for this backend
    (`actors/engine/executor/fake_drafter.py`)."""
    vector_size: int = VECTOR_SIZE
    """Elements of an output."""
    applies_rules: bool = False
    """Whether tokens are drawn as a sequence's rules want; otherwise only grammars are followed."""
    only_token_id: int | None = None
    """Always draw this token, without reading KV: a pass then costs almost nothing."""

    @property
    def drawable(self) -> range:
        return range(self.first_token_id, self.first_token_id + self.num_token_ids)


class FakeBackend(RunsAtOnce, SharesBlocks):
    """Implements `quipu.kernels.backend.Backend` in plain Python."""

    def __init__(self, config: BackendConfig, dials: Dials | None = None) -> None:
        """Make a cache of `num_blocks`, by default enough for sixteen sequences; a token takes eight bytes.

        Raises ValueError for a cache size in bytes.
        """
        if config.num_blocks is None and config.kv_memory != KVMemory():
            raise ValueError("the fake executor has no memory to divide: use --num-blocks")
        num_blocks = config.num_blocks or 1 + _DEFAULT_CONTEXTS * -(-config.max_model_len // config.block_size)
        self.memory_plan = MemoryPlan(
            num_blocks=num_blocks,
            block_size=config.block_size,
            block_bytes=SLOT_BYTES * config.block_size,
            max_model_len=config.max_model_len,
            weights_bytes=0,
            workspace_bytes=None,
        )
        self.dials = dials or Dials()
        self.num_passes = 0
        self.num_tokens = 0
        self._block_size = config.block_size
        self.blocks = FakeBlocks(num_blocks, config.block_size, is_shared=config.shares_cache)
        self._slots = self.blocks.slots
        self._last_drawn = [0] * config.max_num_seqs
        self._max_loras = config.max_loras
        self._adapters: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="fake",
            dtype="none",
            invariant=True,
            kv_cache_dtype="none",
            verifies_drafts=True,
            runs_beside_host=True,  # its passes take no time of the host
        )

    def step(self, batch: StepBatch) -> Drawn:
        dials = self.dials
        self.num_passes += 1
        too_many = dials.max_tokens_in_memory is not None and len(batch.token_ids) > dials.max_tokens_in_memory
        if too_many or dials.hungry_token_id in batch.token_ids:
            raise MemoryError("injected fault: this pass is too large")
        failing = dials.fail_steps > 0
        if failing:
            dials.fail_steps -= 1
        self.blocks.copy(batch.copies)
        rows = range(len(batch.slots))
        for row in rows:
            if failing and row >= len(batch.slots) / 2:
                raise FakeFault("injected fault: this pass fails")
            begin, end = batch.query_start[row], batch.query_start[row + 1]
            token_ids = batch.token_ids[begin:end]
            if batch.carried[row]:
                token_ids = [self._last_drawn[batch.slots[row]]]
            for position, token_id in enumerate(token_ids, batch.positions[row]):
                self._write(batch, row, position, token_id)
            self.num_tokens += len(token_ids)
        if failing:
            raise FakeFault("injected fault: this pass fails")
        broken = [] if dials.nan_token_id is None else self._broken(batch)
        drawing = [row for row in rows if batch.samples[row]]
        drawn = Drawn(rows=drawing, token_ids=[self._draw(batch, row) for row in drawing])
        if batch.processing is not None and batch.processing.masked_rows:
            drawn = masked(batch.processing, drawn)
        if batch.scoring is not None:
            drawn = self._score(batch, batch.scoring.without(broken), drawn)
        if batch.pooling is not None:
            drawn = attrs.evolve(drawn, pooled=self._pool(batch, batch.pooling))
        if broken:
            drawn = attrs.evolve(drawn, broken_rows=broken)
        for row, token_id in zip(drawing, drawn.token_ids, strict=True):
            self._last_drawn[batch.slots[row]] = token_id
        return drawn

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        """Read an adapter's digest, as other backends do; its matrices mean nothing."""
        digest = read_adapter_files(folder, most_bytes=_MOST_ADAPTER_BYTES).digest
        if expected not in (None, digest):
            raise ValueError(f"{folder} has changed: its digest is {digest}, not {expected}")
        if digest not in self._adapters and len(self._adapters) >= self._max_loras:
            raise ValueError(f"{len(self._adapters)} adapters are loaded, which is the most: raise --max-loras")
        self._adapters.add(digest)
        return digest

    def unload_adapter(self, digest: str) -> None:
        self._adapters.discard(digest)

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return memoryview(bytearray(num_blocks * self.memory_plan.block_bytes))

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self.blocks.read(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self.blocks.write(blocks, source)

    @property
    def cache_descriptor(self) -> int | None:
        return self.blocks.descriptor

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.blocks.copy_from(cache, sources, targets)

    def close(self) -> None:
        self.blocks.close()

    def _broken(self, batch: StepBatch) -> list[int]:
        """Return the rows that draw from NaN."""
        ends = batch.query_start
        return [
            row
            for row, samples in enumerate(batch.samples)
            if samples and self.dials.nan_token_id in batch.token_ids[ends[row] : ends[row + 1]]
        ]

    def _write(self, batch: StepBatch, row: int, position: int, token_id: int) -> None:
        if token_id == self.dials.poison_token_id:
            raise FakeFault("the batch holds the poisoned token")
        block = batch.block_tables[row][position // self._block_size]
        adapter = "" if batch.adapters is None else batch.adapters[row]
        if adapter and self._max_loras and adapter not in self._adapters:
            raise FakeFault(f"adapter {adapter} is not loaded")
        self._slots[block * self._block_size + position % self._block_size] = slot_value(token_id, position, adapter)

    def _draw(self, batch: StepBatch, row: int) -> int:
        """Draw the token that follows a row's last one."""
        dials = self.dials
        if dials.only_token_id is not None:
            return dials.only_token_id
        is_read = dials.replies.keys() != {_ANY}
        values = self._read(batch, row, batch.query_start[row + 1] - 1) if is_read else []
        sampling = batch.sampling[row]
        seed = sampling.seed if sampling.temperature > 0 else 0
        token_id = draw(values, seed, batch.output_position[row], dials)
        if dials.applies_rules and batch.processing is not None and row in batch.processing.rows:
            processor = batch.processing.processors[batch.processing.rows.index(row)]
            token_id = draw_by_rules(processor, token_id)
        return token_id

    def _pool(self, batch: StepBatch, pooling: Pooling) -> list[bytes]:
        """Return the sums that are requested, of made-up outputs."""
        sums: list[bytes] = []
        for row, start in zip(pooling.rows, pooling.starts, strict=True):
            columns = pooling.columns or range(self.dials.vector_size)
            total = np.zeros(len(columns))
            for token in range(start, batch.query_start[row + 1]):
                values = [] if self.dials.only_token_id is not None else self._read(batch, row, token)
                is_broken = self.dials.nan_token_id is not None and batch.token_ids[token] == self.dials.nan_token_id
                total += np.nan if is_broken else made_up_output(values, columns)
            sums.append(total.tobytes())
        return sums

    def _score(self, batch: StepBatch, scoring: Scoring, drawn: Drawn) -> Drawn:
        """Add the requested scores to what was drawn."""
        token_of = dict(zip(drawn.rows, drawn.token_ids, strict=True))
        if self.dials.only_token_id is not None:
            return attrs.evolve(
                drawn,
                scores=cheap_scores([token_of[row] for row in scoring.drawn_rows], scoring.drawn_num_top),
                prompt_scores=cheap_scores(scoring.prompt_target_ids, scoring.prompt_num_top),
            )
        drawn_scores, prompt_scores = Scores.empty(), Scores.empty()
        for row, count in zip(scoring.drawn_rows, scoring.drawn_num_top, strict=True):
            values = self._read(batch, row, batch.query_start[row + 1] - 1)
            drawn_scores.extend(score(values, token_of[row], count, self.dials.drawable))
        for token, target_id, count in zip(
            scoring.prompt_tokens, scoring.prompt_target_ids, scoring.prompt_num_top, strict=True
        ):
            values = self._read(batch, bisect_right(batch.query_start, token) - 1, token)
            prompt_scores.extend(score(values, target_id, count, self.dials.drawable))
        return attrs.evolve(drawn, scores=drawn_scores, prompt_scores=prompt_scores)

    def _read(self, batch: StepBatch, row: int, token: int) -> list[int]:
        """Read all slots of a row's sequence up to that of the token with this flat index."""
        size, table = self._block_size, batch.block_tables[row]
        length = batch.positions[row] + token + 1 - batch.query_start[row]
        values: list[int] = []
        for block in table[: -(-length // size)]:
            values += self._slots[block * size : (block + 1) * size].tolist()
        del values[length:]
        if UNWRITTEN in values:
            raise FakeFault(f"read of a slot that no pass has written (position {values.index(UNWRITTEN)})")
        return values


def draw(values: list[int], seed: int, output_position: int, dials: Dials) -> int:
    """Draw the token that follows KV slots `values`."""
    if dials.replies:
        tokens = _reply(values, dials)
        return tokens[output_position] if output_position < len(tokens) else dials.eos_token_id
    if dials.eos_after == output_position:
        return dials.eos_token_id
    mixed = hash((seed & MASK, output_position, *values))
    return dials.first_token_id + (mixed & MASK) % dials.num_token_ids


def _reply(values: list[int], dials: Dials) -> Sequence[int]:
    found: Sequence[int] = ()
    for token_id, tokens in dials.replies.items():
        if token_id == _ANY or any(value == slot_value(token_id, position) for position, value in enumerate(values)):
            found = tokens
    return found
