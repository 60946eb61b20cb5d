"""Runs a model's passes: pads a batch to one of a few sizes, launches kernels, replays a CUDA graph where there is one.

`triton_backend.py` makes a `Runner` once the model is loaded. A pass in which every row has one token is the same
sequence of launches whatever its rows and contexts. So for each padded size of such passes a graph is recorded on first
use, and the host then issues one launch instead of hundreds. Other passes are launched kernel by kernel.

What must always hold: what changes from step to step is read by a recorded pass from `Columns`, `Tables`, the sampler's
`last_drawn` and the slots of adapters (`adapters.py`) only, whose memory never moves. If other memory moves, graphs are
dropped (`_forget_graphs`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import attrs
import numpy as np
import torch

from ..batch import StepBatch
from ..kv_cache import KVCache
from ..models.families import Model
from .attention import Parts
from .columns import Capacity, Columns, Int32s, Tables, lengths_of
from .configs import Tiles, token_ladder
from .device import Device
from .matrices import Linear
from .memory import Heads, Memory, RopeTables
from .mixture import Addresses
from .ops import TritonOps
from .row_groups import RowGroups, group_rows
from .triton_adapters import RowAdapters, TritonAdapters

_PARTS_BYTES = 256 << 20
"""Initial size of decode's partial results; they grow if many rows have long contexts."""


@attrs.frozen
class Bounds:
    """The bounds for which memory was allocated. Kernels do not check them; `Runner` does."""

    num_tokens: int
    num_rows: int
    num_positions: int
    vocab_size: int


@attrs.frozen
class Finished:
    """A launched pass."""

    logits: Callable[[list[int]], tuple[torch.Tensor, list[int]]]
    """Takes flat indexes of tokens; returns rows of logits (float32) and each token's row among them. The next pass
    overwrites the memory."""


class Runner:
    """One model over one cache."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        tables: Tables,
        last_drawn: torch.Tensor,
        device: Device,
        *,
        bounds: Bounds,
        heads: Heads,
        tiles: Tiles,
        linear: Linear,
        replays: bool,
        adapters: TritonAdapters | None = None,
    ) -> None:
        """`replays`: whether a pass of decodes is captured as a graph, and replayed from then on."""
        self._model = model
        self._tables = tables
        self._last_drawn = last_drawn
        self._device = device
        self._bounds = bounds
        self._heads = heads
        self._tiles = tiles
        self._linear = linear
        self._replays = replays
        self._adapters = adapters
        self._ladder = token_ladder(bounds.num_tokens)
        per_item = heads.num_heads * (heads.widest + 2) * 4
        longest = -(-bounds.num_positions // tiles.chunk)
        num_items = min(bounds.num_rows * longest, max(longest, _PARTS_BYTES // per_item))
        self._memory = Memory(
            cache=cache,
            tables=tables.device,
            parts=self._make_parts(num_items),
            rope_tables=RopeTables(device.torch_device),
            addresses=Addresses(device.torch_device),
        )
        self._columns: dict[int, Columns] = {}
        # by size, and whether a row has an adapter
        self._graphs: dict[tuple[int, bool], Callable[[], torch.Tensor]] = {}
        self.num_replayed = 0
        """Passes that were replayed from a graph."""

    def run(self, batch: StepBatch, slots: Int32s | None = None) -> Finished:
        """Launch a pass. Raises ValueError for a batch that would access memory outside of the model or the cache.

        `slots`, to warm up: those of the tokens' adapters, instead of the batch's adapters.
        """
        lengths = lengths_of(batch)
        self._check(batch, lengths)
        slots = self._adapter_slots(batch, lengths) if slots is None else slots
        self._tables.update(batch.slots, batch.block_tables)
        self._make_room(batch, lengths)
        num_tokens = self._padded(len(batch.token_ids))
        columns = self._columns_of(num_tokens)
        columns.fill(
            batch, lengths, self._tables.host, block_size=self._memory.cache.block_size, chunk=self._tiles.chunk,
            tile=self._heads.tile_tokens(self._tiles),
            adapted=None if slots is None or self._adapters is None else group_rows(slots, self._adapters.tile),
        )  # fmt: skip
        adapters = None if slots is None else self._row_adapters(columns)
        if self._replays and columns.num_tiles == 0 and num_tokens <= self._padded(self._bounds.num_rows):
            logits_NV = self._replay(columns, adapters)
            self.num_replayed += 1
            return Finished(lambda tokens: (logits_NV, tokens))
        x_ND = self._trunk(columns, adapters)
        return Finished(lambda tokens: (self._head(columns, x_ND, tokens, slots), list(range(len(tokens)))))

    def _adapter_slots(self, batch: StepBatch, lengths: Int32s) -> Int32s | None:
        """Return the slot of each token's adapter, or -1; None if none has one."""
        rows = None if self._adapters is None else self._adapters.of_rows(batch)
        if rows is None:
            return None
        return np.repeat(np.array([-1 if slot is None else slot for slot in rows], dtype=np.int32), lengths)

    def _row_adapters(self, columns: Columns) -> RowAdapters | None:
        if self._adapters is None:
            return None
        c = columns.device
        return RowAdapters(self._adapters, RowGroups(c["adapted_rows"], c["adapted_tiles"]))

    def _replay(self, columns: Columns, adapters: RowAdapters | None) -> torch.Tensor:
        kind = (columns.capacity.num_tokens, adapters is not None)
        if kind not in self._graphs:
            with nullcontext() if self._adapters is None else self._adapters.undisturbed():
                self._graphs[kind] = self._device.capture(lambda: self._whole(columns, adapters))
        return self._graphs[kind]()

    def _trunk(self, columns: Columns, adapters: RowAdapters | None) -> torch.Tensor:
        c = columns.device
        carried_N = self._last_drawn[c["carry_slots"]]
        token_ids_N = torch.where(c["carried"] == 1, carried_N, c["token_ids"])
        ops = TritonOps(columns, self._memory, self._tiles, self._linear, adapters=adapters)
        return ops.finish(self._model.forward(token_ids_N, ops))

    def _whole(self, columns: Columns, adapters: RowAdapters | None) -> torch.Tensor:
        """Run the trunk, then the head for every token."""
        return self._logits(columns, self._trunk(columns, adapters), adapters)

    def _head(self, columns: Columns, x_ND: torch.Tensor, tokens: Sequence[int], slots: Int32s | None) -> torch.Tensor:
        """Run the head for some tokens; `slots` are those of all tokens."""
        padded = [*tokens, *[0] * (self._padded(len(tokens)) - len(tokens))]
        adapters = None
        if slots is not None and self._adapters is not None:
            adapters = RowAdapters(self._adapters, self._adapters.groups(slots[list(tokens)]))
        return self._logits(columns, x_ND[padded], adapters)

    def _logits(self, columns: Columns, x_MD: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        # in float32: half-precision formats are so coarse that the best tokens would often be tied
        ops = TritonOps(columns, self._memory, self._tiles, self._linear, results_in=torch.float32, adapters=adapters)
        return ops.finish(self._model.logits(x_MD, ops))

    def _padded(self, count: int) -> int:
        return self._ladder[bisect.bisect_left(self._ladder, count)]

    def _columns_of(self, num_tokens: int) -> Columns:
        if num_tokens not in self._columns:
            num_rows = min(num_tokens, self._padded(self._bounds.num_rows))
            tile = self._heads.tile_tokens(self._tiles)
            capacity = Capacity(
                num_tokens=num_tokens,
                num_rows=num_rows,
                num_tiles=num_tokens // tile + num_rows,
                num_items=self._memory.parts.num_items,
                num_adapted_tiles=0 if self._adapters is None else self._adapters.most_tiles(num_tokens),
            )
            self._columns[num_tokens] = Columns(capacity, self._device)
        return self._columns[num_tokens]

    def _make_room(self, batch: StepBatch, lengths: Int32s) -> None:
        """Enlarge the memory for decode's partial results if this pass has more items than any before."""
        num_items = sum(
            position // self._tiles.chunk + 1
            for position, length in zip(batch.positions, lengths, strict=True)
            if length == 1
        )
        if num_items > self._memory.parts.num_items:
            self._memory = attrs.evolve(self._memory, parts=self._make_parts(2 * num_items))
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._columns.clear()

    def _make_parts(self, num_items: int) -> Parts:
        return Parts(num_items, self._heads.num_heads, self._heads.widest, self._device)

    def _check(self, batch: StepBatch, lengths: Int32s) -> None:
        bounds, size = self._bounds, self._memory.cache.block_size
        if len(batch.token_ids) > bounds.num_tokens:
            raise ValueError(f"{len(batch.token_ids)} tokens in a pass, where at most {bounds.num_tokens} are possible")
        if min(batch.token_ids) < 0 or max(batch.token_ids) >= bounds.vocab_size:
            raise ValueError(f"a token id is outside of 0 to {bounds.vocab_size - 1}")
        ends = [position + int(length) for position, length in zip(batch.positions, lengths, strict=True)]
        if min(batch.positions) < 0 or max(ends) > bounds.num_positions:
            raise ValueError(f"a position is outside of 0 to {bounds.num_positions - 1}")
        for row, (table, end) in enumerate(zip(batch.block_tables, ends, strict=True)):
            if len(table) * size < end:
                raise ValueError(f"the block table of row {row} ends before its last token")
