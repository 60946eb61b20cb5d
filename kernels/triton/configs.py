"""Tile shapes and launch options, fixed for each architecture: no autotuning, which would let a timing choose the bits.

The tests take small ones, so that a few tokens already fill several tiles.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Launch:
    """How one kernel is compiled."""

    rows: int
    """Of a tile: queries, or rows of a matrix product. From 64 on the tensor cores take wgmma, below mma.sync."""
    num_warps: int
    num_stages: int


@attrs.frozen
class Tiles:
    """Everything that decides in which order numbers are summed, and how kernels are launched."""

    chunk: int
    """Keys that are attended to as one, on a grid over absolute positions. A multiple of `keys`."""
    keys: int
    """Keys of one step within a chunk."""
    decode: Launch
    """`rows` is the least: a group of more query heads takes the next power of two."""
    prefill: Launch
    prefill_wide: Launch
    """For heads of more than 128 elements, whose sums would not fit into registers."""
    programs: int
    """Of the decode kernel, over all key/value heads."""
    linear: Launch
    columns: int
    """Of a tile of a matrix product of our own..."""
    depth: int
    """...its step along K..."""
    slice: int
    """...and how much of K is summed before it meets the rest."""
    few_rows: int
    """Up to here, slices are spread over programs."""
    fusion: bool
    """Whether the compiler may contract a product and a sum. Where two kernels must round alike it may not."""


HOPPER = Tiles(
    chunk=256,
    keys=64,
    decode=Launch(rows=16, num_warps=4, num_stages=3),
    prefill=Launch(rows=128, num_warps=8, num_stages=2),
    prefill_wide=Launch(rows=64, num_warps=8, num_stages=2),
    programs=132 * 4,
    linear=Launch(rows=64, num_warps=4, num_stages=4),
    columns=64,
    depth=64,
    slice=512,
    few_rows=64,
    fusion=False,
)
"""sm_90. Shared memory of each kernel stays below the 227 KB that a program can have (`make test-triton` checks)."""

SMALL = Tiles(
    chunk=16,
    keys=8,
    decode=Launch(rows=16, num_warps=4, num_stages=1),
    prefill=Launch(rows=16, num_warps=4, num_stages=1),
    prefill_wide=Launch(rows=16, num_warps=4, num_stages=1),
    programs=2,
    linear=Launch(rows=16, num_warps=4, num_stages=1),
    columns=32,
    depth=32,
    slice=64,
    few_rows=16,
    fusion=False,
)
"""For the interpreter."""


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """What suits a GPU of this compute capability. Only Hopper's have been compiled and looked at."""
    if capability[0] == 9:
        return HOPPER
    # others have as little as 99 KB of shared memory, and no wgmma
    return attrs.evolve(
        HOPPER,
        prefill=Launch(rows=64, num_warps=4, num_stages=2),
        prefill_wide=Launch(rows=32, num_warps=4, num_stages=1),
        linear=Launch(rows=64, num_warps=4, num_stages=3),
    )


def shared_tile(tiles: Tiles) -> Tiles:
    """The same with decode's tile for prompts, so that both are one arithmetic."""
    return attrs.evolve(tiles, prefill=tiles.decode, prefill_wide=tiles.decode)


def token_ladder(most: int) -> list[int]:
    """How many tokens a pass may have after padding, ascending, up to `most`.

    So few sizes that all of them can be tried at start, and so close that padding adds at most 8 tokens or a seventh.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        step = 8
        while sizes[-1] >= 14 * step:
            step *= 2
        sizes.append(sizes[-1] // step * step + step)
    return [*(size for size in sizes if size < most), most]
