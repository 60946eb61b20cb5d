"""The executor's own record of what each physical block contains.

Used by `step_runner.py`. Tags are made from the tokens that were fed, not from what a plan claims, so a wrong or stale
grant is detected. The mover reads the tags of the blocks that it copies; blocks that it has written get their tags from
the checked headers. It may do so from any thread, since each tag is replaced as a whole.

What must always hold: a block that a pass or a move is about to write, or failed to write, has no tag; a block that is
overwritten gets a new `Tag`, so the same tag before and after a copy proves that the copy has its contents.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import attrs

from ...shared.block_keys import chain_image_keys
from .sequence_state import SequenceState


@attrs.frozen(eq=False)
class Tag:
    """The contents of a physical block, as far as the executor has written it."""

    key: bytes | None
    """The chain key of its contents; None while the block is not full."""
    num_filled: int


class BlockTags:
    """One tag for each physical block; None for blocks with unknown contents."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._tags: list[Tag | None] = [None] * num_blocks
        self._block_size = block_size

    def contains(self, block: int, key: bytes) -> bool:
        """Return whether a block is full and its contents are those of `key`."""
        tag = self._tags[block]
        return tag is not None and tag.key == key

    def tag_of(self, block: int) -> Tag | None:
        """Return the tag of a block; None if its contents are unknown."""
        return self._tags[block]

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the tags of blocks that are about to be written by a move."""
        for block in blocks:
            self._tags[block] = None

    def set_loaded(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Tag blocks that a move has filled."""
        for block, key in zip(blocks, keys, strict=True):
            self._tags[block] = Tag(key, self._block_size)

    def num_confirmed_tokens(self, table: Sequence[int], keys: Sequence[bytes]) -> int:
        """Return how many tokens of the leading blocks of `table` match `keys`."""
        tags = self._tags
        for index, key in enumerate(keys):
            tag = tags[table[index]]
            if tag is None or tag.key != key:
                return index * self._block_size
        return len(keys) * self._block_size

    def clear(self, states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Remove the tags of the blocks that rows are about to write, each from position `start` to `end`."""
        self.forget(self.written_by(states, starts, ends))

    def written_by(self, states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Return the blocks that rows write, each from position `start` to `end`."""
        size = self._block_size
        return [
            state.table[index]
            for state, start, end in zip(states, starts, ends, strict=True)
            for index in range(start // size, -(-end // size))
        ]

    def write(
        self,
        states: Sequence[SequenceState],
        starts: Sequence[int],
        ends: Sequence[int],
        but: Container[int] = frozenset(),
    ) -> None:
        """Tag the blocks that rows have written, each from position `start` to `end`.

        `but`: blocks that a later pass, already launched, is writing.
        """
        size, tags = self._block_size, self._tags
        for state, start, end in zip(states, starts, ends, strict=True):
            table, keys = state.table, state.keys
            num_full = end // size
            num_keyed = len(keys) - 1
            if num_full > num_keyed:
                first = num_keyed * size
                new = state.tokens[first : num_full * size]
                keys += chain_image_keys(keys[-1], new, size, state.images, first)
            for index in range(start // size, num_full):
                if table[index] not in but:
                    tags[table[index]] = Tag(keys[index + 1], size)
            if end % size and table[num_full] not in but:
                tags[table[num_full]] = Tag(None, end % size)
