"""The block types of GGUF as quantized rows: what the bytes of a block mean, in ggml's own arithmetic.

A block holds consecutive elements of a row: their codes, and a scale or two. The "K" types have scales of groups, which
are themselves quantized.

What must always hold: scale * (code - zero) + offset rounds as ggml's dequantization does, so the numbers are equal to
the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from .quantized import QuantizedLayout, QuantizedRows

Decode = Callable[[torch.Tensor], QuantizedRows]


@attrs.frozen
class BlockType:
    """One type of blocks."""

    layout: QuantizedLayout
    decode: Decode
    """From bytes `[rows, blocks, bytes of a block]`."""


def _halves(bytes_ON2: torch.Tensor) -> torch.Tensor:
    """Read a float16 of each block."""
    return bytes_ON2.contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(bytes_ONB: torch.Tensor) -> torch.Tensor:
    """Return the lower nibbles of all bytes, then the upper ones."""
    return torch.cat([bytes_ONB & 0xF, bytes_ONB >> 4], dim=-1)


def _rows(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Return unsigned codes as signed ones, in rows."""
    return codes.view(torch.int8).sub_(middle).view(codes.shape[0], -1)


def _with_minimum(
    codes_OI: torch.Tensor, scales_OG: torch.Tensor, offsets_OG: torch.Tensor, middle: int
) -> QuantizedRows:
    """Return rows whose codes count from a minimum, which the offset is."""
    zeros_OG = torch.full_like(scales_OG, -middle, dtype=torch.int8)
    return QuantizedRows(codes_OI, scales_OG, zeros_OG, offsets_OG)


def _q8_0(blocks: torch.Tensor) -> QuantizedRows:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return QuantizedRows(codes.view(codes.shape[0], -1), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(_rows(_nibbles(blocks[..., 2:]), 8), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> QuantizedRows:
    codes_OI = _rows(_nibbles(blocks[..., 4:]), 8)
    return _with_minimum(codes_OI, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), 8)


def _fifth_bits(bytes_ON4: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, each in the place of the fifth bit of a code."""
    bits = torch.bitwise_right_shift(bytes_ON4.unsqueeze(-1), torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> QuantizedRows:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantizedRows(_rows(codes, 16), _halves(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> QuantizedRows:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _with_minimum(_rows(codes, 16), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), 16)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets of the eight groups of each block: six bits each, in twelve bytes."""
    low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 0x3F, (both & 0xF) | ((low >> 2) & 0x30)], dim=-1)
    minimums = torch.cat([high & 0x3F, (both >> 4) | ((high >> 2) & 0x30)], dim=-1)
    factor, minimum_factor = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    scales_OG = (factor.unsqueeze(-1) * scales.float()).flatten(1)
    offsets_OG = -(minimum_factor.unsqueeze(-1) * minimums.float()).flatten(1)
    return scales_OG, offsets_OG


def _k_nibbles(bytes_ON128: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of a block: the lower ones of 32 bytes, then their upper ones, `[rows, blocks, 8, 32]`."""
    groups = bytes_ON128.view(*bytes_ON128.shape[:-1], 4, 1, 32)
    return torch.cat([groups & 0xF, groups >> 4], dim=-2).flatten(-3, -2)


def _q4_k(blocks: torch.Tensor) -> QuantizedRows:
    scales_OG, offsets_OG = _k_scales(blocks)
    return _with_minimum(_rows(_k_nibbles(blocks[..., 16:]), 8), scales_OG, offsets_OG, 8)


def _q5_k(blocks: torch.Tensor) -> QuantizedRows:
    scales_OG, offsets_OG = _k_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = (torch.bitwise_right_shift(blocks[..., 16:48].unsqueeze(-2), shifts) & 1) << 4
    return _with_minimum(_rows(_k_nibbles(blocks[..., 48:]) | fifth, 16), scales_OG, offsets_OG, 16)


def _q6_k(blocks: torch.Tensor) -> QuantizedRows:
    shape = blocks.shape[:-1]
    low = blocks[..., :128].view(*shape, 2, 1, 64)
    low = torch.cat([low & 0xF, low >> 4], dim=-2)  # [.., 2, 2, 64]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = torch.bitwise_right_shift(blocks[..., 128:192].view(*shape, 2, 1, 32), shifts) & 3
    codes = low.flatten(-3) | (high.flatten(-3) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return QuantizedRows(_rows(codes, 32), (_halves(blocks[..., 208:]).unsqueeze(-1) * scales).flatten(1))


def _mxfp4(blocks: torch.Tensor) -> QuantizedRows:
    codes_OI = _rows(_nibbles(blocks[..., 1:]), 0)
    powers_OG = torch.ldexp(torch.ones(blocks.shape[:-1]), blocks[..., 0].int() - 127)
    return QuantizedRows(codes_OI, powers_OG, is_e2m1=True)


DECODERS = {
    "Q4_0": BlockType(QuantizedLayout(4, 32, has_offsets=False), _q4_0),
    "Q4_1": BlockType(QuantizedLayout(4, 32, has_offsets=True), _q4_1),
    "Q5_0": BlockType(QuantizedLayout(8, 32, has_offsets=False), _q5_0),
    "Q5_1": BlockType(QuantizedLayout(8, 32, has_offsets=True), _q5_1),
    "Q8_0": BlockType(QuantizedLayout(8, 32, has_offsets=False), _q8_0),
    "Q4_K": BlockType(QuantizedLayout(4, 32, has_offsets=True), _q4_k),
    "Q5_K": BlockType(QuantizedLayout(8, 32, has_offsets=True), _q5_k),
    "Q6_K": BlockType(QuantizedLayout(8, 16, has_offsets=False), _q6_k),
    "MXFP4": BlockType(QuantizedLayout(4, 32, has_offsets=False, is_e2m1=True), _mxfp4),
}
"""Quantized types; the others of `gguf_file.BLOCKS` are plain numbers."""
