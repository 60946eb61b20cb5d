"""Tile shapes and launch options, fixed for each architecture: timing, as in autotuning, must not decide bits."""

from __future__ import annotations

import attrs


@attrs.frozen
class Launch:
    """How one kernel is compiled."""

    rows: int
    """Of a tile: queries, or rows of a matrix product. From 64 on tensor cores use wgmma, below that mma.sync."""
    num_warps: int
    num_stages: int


@attrs.frozen
class Tiles:
    """Everything that determines the order of summation, and how kernels are launched."""

    chunk: int
    """Keys of a chunk, on a grid over absolute positions. A multiple of `keys`."""
    keys: int
    """Keys of one step within a chunk."""
    decode: Launch
    """`rows` is the minimum: a group of more query heads uses the next power of two."""
    prefill: Launch
    prefill_wide: Launch
    """For heads of more than 128 elements, whose accumulators would not fit into registers otherwise."""
    programs: int
    """Programs of the decode kernel, over all key/value heads."""
    linear: Launch
    columns: int
    """Columns of a tile of our own matrix product..."""
    depth: int
    """...its step along K..."""
    slice: int
    """...and the part of K that is summed before it is added to the total."""
    adapted: Launch
    """Of what adapters add to a product."""
    few_rows: int
    """Up to this many rows, slices are spread over programs."""
    fusion: bool
    """Whether the compiler may contract a product and a sum. It may not where two kernels must round alike."""


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
    adapted=Launch(rows=16, num_warps=4, num_stages=3),
    few_rows=64,
    fusion=False,
)
"""For sm_90. Each kernel needs less than the 227 KB of shared memory that a program can have (`make test-triton`)."""


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """Return the tiles for a GPU of this compute capability. Only those of Hopper have been compiled and inspected."""
    if capability[0] == 9:
        return HOPPER
    # others have as little as 99 KB of shared memory, and no wgmma
    return attrs.evolve(
        HOPPER,
        prefill=Launch(rows=64, num_warps=4, num_stages=2),
        prefill_wide=Launch(rows=32, num_warps=4, num_stages=1),
        linear=Launch(rows=64, num_warps=4, num_stages=3),
    )


def tiles_of_heads(tiles: Tiles, head_dim: int) -> Tiles:
    """Return the tiles for heads of this size: of latents (576 elements) a tile has few keys and queries."""
    if head_dim <= 256:
        return tiles
    few = Launch(rows=16, num_warps=8, num_stages=tiles.prefill_wide.num_stages)
    return attrs.evolve(tiles, keys=16, decode=few, prefill=few, prefill_wide=few)


def shared_tile(tiles: Tiles) -> Tiles:
    """Return the same tiles, but with decode's tile for prefill, so that both compile the same arithmetic."""
    return attrs.evolve(tiles, prefill=tiles.decode, prefill_wide=tiles.decode)


def token_ladder(most: int) -> list[int]:
    """Return the padded sizes of a pass in tokens, ascending, up to `most`.

    They are few enough to try all of them at start, and close enough that padding adds at most 8 tokens or a seventh.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        step = 8
        while sizes[-1] >= 14 * step:
            step *= 2
        sizes.append(sizes[-1] // step * step + step)
    return [*(size for size in sizes if size < most), most]
