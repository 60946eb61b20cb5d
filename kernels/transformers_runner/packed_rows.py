"""A `StepBatch` as tensors: its rows behind one another as one sequence of tokens, and what each attends to.

`transformers_backend.py` makes a `PackedRows` for each pass; `paged_attention.py` asks it in every layer which slots
are written and read. Rows of one token are read together, in groups of similar length; a longer row is read alone.

What must always hold: a slot that no token of the row's sequence has written is never read unmasked; a window limits
only how far a token sees back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import torch

from ..batch import StepBatch


@attrs.frozen(eq=False)
class Reads:
    """Rows of equally many tokens, and the blocks that they read."""

    tokens_Rn: torch.Tensor
    """Flat indexes of their tokens."""
    blocks_RB: torch.Tensor
    first: int
    end: int
    """The slots of these blocks, one after the other, that are read."""
    hidden_RnC: torch.Tensor | None
    """Those that a token does not see, of the slots from `first` to `end`; None: it sees all."""
    unwritten: tuple[torch.Tensor, torch.Tensor] | None
    """Rows and slots of what no token of the row has written, which may hold anything; None: there is nothing."""


@attrs.frozen(eq=False)
class _Row:
    start: int
    length: int
    position: int
    blocks: Sequence[int]

    @property
    def context(self) -> int:
        return self.position + self.length

    def first_seen(self, window: int | None) -> int:
        """Return the first position that a token of the row sees."""
        return 0 if window is None else max(0, self.position - window + 1)


class PackedRows:
    """The rows of one pass: N tokens in all."""

    def __init__(
        self,
        batch: StepBatch,
        last_drawn: Sequence[int | None],
        block_size: int,
        device: torch.device,
        *,
        whole_images: bool = False,
    ) -> None:
        """`whole_images`: a token of an image sees all of the image's tokens, which are there.

        Raises ValueError as `StepBatch.inputs`, and for a row that ends within a whole image.
        """
        positions: list[int] = []
        self._rows: list[_Row] = []
        for row, position in enumerate(batch.positions):
            start, end = batch.query_start[row], batch.query_start[row + 1]
            positions += range(position, position + end - start)
            self._rows.append(_Row(start, end - start, position, batch.block_tables[row]))
        written = [
            row.blocks[position // block_size] for row in self._rows for position in range(row.position, row.context)
        ]
        self._size, self._device = block_size, device
        self._reads: dict[int | None, list[Reads]] = {}
        self.token_ids_1N = self._tensor([batch.inputs(last_drawn)])
        self.positions_1N = self._tensor([positions])
        self.blocks_N = self._tensor(written)
        """The block to which each token's keys and values are written..."""
        self.offsets_N = self.positions_1N[0] % block_size
        """...and the slot within it."""
        self._last_seen_N = self._ends_of_images(batch) if whole_images and batch.images else self.positions_1N[0]
        """The last position that each token sees."""

    def _ends_of_images(self, batch: StepBatch) -> torch.Tensor:
        """Return each token's position, or the last one of the image of which it is a part."""
        last_seen_N = self.positions_1N[0].clone()
        for part in batch.images:
            row = self._rows[part.row]
            end = row.position + part.offset - part.first + part.image.num_tokens
            if end > row.context:
                raise ValueError(f"row {part.row} ends at {row.context}, within an image that ends at {end}")
            token = row.start + part.offset
            last_seen_N[token : token + part.count] = end - 1
        return last_seen_N

    def reads(self, window: int | None) -> list[Reads]:
        """Return what the rows read in a layer in which a token sees the last `window` tokens; None: all."""
        if window not in self._reads:
            self._reads[window] = [self._read(rows, window) for rows in self._groups(window)]
        return self._reads[window]

    def _groups(self, window: int | None) -> list[list[_Row]]:
        """Return rows that are read together: of one token, and with numbers of blocks that differ twofold at most."""
        groups: dict[int, list[_Row]] = defaultdict(list)
        alone = []
        for row in self._rows:
            if row.length == 1:
                num_blocks = row.position // self._size - row.first_seen(window) // self._size + 1
                groups[num_blocks.bit_length()].append(row)
            else:
                alone.append([row])
        return [*alone, *groups.values()]

    def _read(self, rows: list[_Row], window: int | None) -> Reads:
        size, length = self._size, rows[0].length
        lows = [row.first_seen(window) // size for row in rows]
        tables = [row.blocks[low : (row.context - 1) // size + 1] for low, row in zip(lows, rows, strict=True)]
        longest = max(map(len, tables))
        tokens = self._tensor([list(range(row.start, row.start + length)) for row in rows])
        # what a pad names is hidden, but must exist
        blocks = self._tensor([[*table, *[0] * (longest - len(table))] for table in tables])
        if len(rows) == 1:
            first, end = rows[0].first_seen(window) - lows[0] * size, rows[0].context - lows[0] * size
            needs_mask = length > 1
        else:
            first, end, needs_mask = 0, longest * size, True
        if not needs_mask:
            return Reads(tokens, blocks, first, end, None, None)
        keys_RC = torch.arange(first, end, device=self._device) + self._tensor([[low * size] for low in lows])
        hidden_RnC = keys_RC.unsqueeze(1) > self._last_seen_N[tokens].unsqueeze(2)
        unwritten = None
        if len(rows) > 1:
            row_at, slot_at = hidden_RnC[:, -1].nonzero(as_tuple=True)
            unwritten = row_at, slot_at
        if window is not None:
            hidden_RnC |= keys_RC.unsqueeze(1) <= self.positions_1N[0][tokens].unsqueeze(2) - window
        return Reads(tokens, blocks, first, end, hidden_RnC, unwritten)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)
